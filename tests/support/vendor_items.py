"""Blocks and items of the past as clients send them after sessions with other servers.

Each is (API, role of its message or None for an item of its own, the block or item, texts that its line keeps).
"""

import base64
from urllib.parse import quote

PDF = "JVBERi0xLjQK"
ASSISTANT, USER = "assistant", "user"
BLOCKS = [
    # Anthropic's
    (
        "messages",
        ASSISTANT,
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "tea"}},
        ["tea"],
    ),
    (
        "messages",
        ASSISTANT,
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [
                {
                    "type": "web_search_result",
                    "title": "Tea",
                    "url": "https://tea.example",
                    "encrypted_content": "c2Vj",
                }
            ],
        },
        ["Tea"],
    ),
    (
        "messages",
        ASSISTANT,
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
        },
        ["unavailable"],
    ),
    (
        "messages",
        ASSISTANT,
        {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": {"url": "https://a"}},
        [],
    ),
    (
        "messages",
        ASSISTANT,
        {
            "type": "code_execution_tool_result",
            "tool_use_id": "s",
            "content": {
                "type": "code_execution_result",
                "stdout": "42",
                "stderr": "",
                "return_code": 0,
                "content": [],
            },
        },
        ["42"],
    ),
    ("messages", ASSISTANT, {"type": "bash_code_execution_tool_result", "tool_use_id": "s", "content": {}}, []),
    (
        "messages",
        ASSISTANT,
        {"type": "mcp_tool_use", "id": "m", "name": "find", "server_name": "docs", "input": {"q": "x"}},
        ["find", "docs"],
    ),
    (
        "messages",
        ASSISTANT,
        {
            "type": "mcp_tool_result",
            "tool_use_id": "m",
            "is_error": False,
            "content": [{"type": "text", "text": "found"}],
        },
        ["found"],
    ),
    ("messages", ASSISTANT, {"type": "container_upload", "file_id": "file_1"}, ["file_1"]),
    ("messages", USER, {"type": "container_upload", "file_id": "file_1"}, ["file_1"]),
    ("messages", ASSISTANT, {"type": "compaction", "content": "We talked of tea."}, ["We talked of tea."]),
    (
        "messages",
        USER,
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}},
        [],
    ),
    (
        "messages",
        USER,
        {"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}},
        ["https://a/b.pdf"],
    ),
    (
        "messages",
        USER,
        {"type": "document", "title": "T", "source": {"type": "file", "file_id": "file_2"}},
        ["file_2"],
    ),
    ("messages", USER, {"type": "image", "source": {"type": "file", "file_id": "file_3"}}, []),
    ("messages", USER, {"type": "tool_use", "id": "t", "name": "f", "input": {}}, ["'f'"]),
    ("messages", ASSISTANT, {"type": "tool_use", "id": "t", "input": {}}, []),
    ("messages", USER, {"type": "mid_conv_system", "note": "n"}, ["'n'"]),
    # OpenAI's chat completions
    ("chat", USER, {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, ["wav"]),
    ("chat", USER, {"type": "file", "file": {"file_id": "file_4"}}, ["file_4"]),
    (
        "chat",
        USER,
        {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}},
        ["a.pdf"],
    ),
    ("chat", USER, {"type": "video_url", "video_url": {"url": "https://a/b.mp4"}}, ["https://a/b.mp4"]),
    ("chat", USER, {"type": "audio_url", "audio_url": {"url": "https://a/b.mp3"}}, ["b.mp3"]),
    ("chat", USER, {"type": "text", "text": 5}, ["5"]),
    ("chat", ASSISTANT, {"type": "image_url", "image_url": {"url": "https://a/b.png"}}, []),
    ("chat", USER, {"text": "without a type"}, ["without a type"]),
    ("chat", USER, 5, ["5"]),
    ("chat", USER, None, []),
    ("chat", USER, ["a", "list"], ["a", "list"]),
    # OpenAI's responses
    ("responses", USER, {"type": "input_file", "file_id": "file_5"}, ["file_5"]),
    ("responses", USER, {"type": "input_file", "file_url": "https://a/b.pdf"}, ["https://a/b.pdf"]),
    ("responses", USER, {"type": "input_audio", "input_audio": {"data": "A", "format": "mp3"}}, ["mp3"]),
    ("responses", USER, {"type": "input_image", "file_id": "file_6"}, []),
    ("responses", None, {"type": "item_reference", "id": "msg_1"}, []),
    ("responses", None, {"type": "mcp_list_tools", "id": "l", "server_label": "docs", "tools": []}, ["docs"]),
    (
        "responses",
        None,
        {"type": "mcp_call", "id": "m", "server_label": "docs", "name": "find", "arguments": "{}", "output": "none"},
        ["find", "none"],
    ),
    ("responses", None, {"type": "mcp_approval_request", "id": "a", "server_label": "docs", "name": "f"}, ["docs"]),
    ("responses", None, {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True}, ["True"]),
    (
        "responses",
        None,
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "tea"}},
        ["tea"],
    ),
    ("responses", None, {"type": "file_search_call", "id": "f", "queries": ["tea"], "results": None}, ["tea"]),
    (
        "responses",
        None,
        {
            "type": "code_interpreter_call",
            "id": "c",
            "code": "1 + 1",
            "container_id": "k",
            "outputs": [{"type": "logs", "logs": "2"}],
        },
        ["1 + 1"],
    ),
    (
        "responses",
        None,
        {"type": "image_generation_call", "id": "g", "status": "completed", "result": "iVBORw0K"},
        [],
    ),
    ("responses", None, {"type": "compaction", "id": "cmp_1", "encrypted_content": "c2VjcmV0"}, []),
    ("responses", None, {"type": "ghost_snapshot", "ghost_commit": {"id": "1"}}, []),
    ("responses", None, {"type": "function_call", "call_id": "f", "arguments": "{}"}, []),
    ("responses", None, {"type": "custom_tool_call", "call_id": "f", "input": "x"}, ["x"]),
    ("responses", None, {"type": "additional_tools", "tools": []}, []),
    ("responses", None, {}, []),
    ("responses", None, [1], ["1"]),
    ("responses", None, "a text", ["a text"]),
]

# Items and messages without loss: what they contain is in the prompt, and there is no warning.
READ = [
    (
        "responses",
        [
            {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls -a"]}},
            {
                "type": "shell_call_output",
                "call_id": "s",
                "output": [{"stdout": "LISTED", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
            },
        ],
        ["ls -a", "LISTED", "exit_code"],
    ),
    (
        "responses",
        [
            {"type": "apply_patch_call", "call_id": "p", "operation": {"type": "delete_file", "path": "a.py"}},
            {"type": "apply_patch_call_output", "call_id": "p", "status": "completed", "output": "DONE"},
        ],
        ["a.py", "DONE"],
    ),
    (
        "responses",
        [
            {"type": "tool_search_call", "call_id": "t", "arguments": {"query": "tea"}},
            {"type": "tool_search_output", "call_id": "t", "tools": [{"type": "function", "name": "brew"}]},
        ],
        ["tea", "brew"],
    ),
    (
        "responses",
        [
            {"type": "computer_call", "call_id": "c", "action": {"type": "click", "x": 1}},
            {"type": "computer_call_output", "call_id": "c", "output": "CLICKED"},
        ],
        ["click", "CLICKED"],
    ),
    (
        "responses",
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": {"ok": 1}},
        ],
        ["*** Begin", '{"ok": 1}'],
    ),
    ("responses", [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}], []),
    ("responses", [{"role": "assistant", "content": [{"type": "refusal", "refusal": "I WILL NOT"}]}], ["I WILL NOT"]),
    ("chat", [{"role": "assistant", "content": None, "refusal": "I WILL NOT"}], ["I WILL NOT"]),
    (
        "chat",
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "no JSON"}}],
            },
            {"role": "tool", "content": {"a": ["RESULT"]}},
        ],
        ["no JSON", '{"a": ["RESULT"]}'],
    ),
    ("chat", [{"role": "tool", "tool_call_id": "orphan", "content": "RESULT"}], ["RESULT"]),
    (
        "chat",
        [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "orphan", "arguments": {}}}]}],
        ["orphan"],
    ),
    ("chat", [{"role": "assistant"}, {"role": "assistant", "content": ""}, {"role": "assistant", "content": []}], []),
    ("chat", [{"role": "user", "content": ["TEXT", {"type": "text", "text": "MORE"}]}], ["TEXTMORE"]),
    (
        "messages",
        [
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "text",
                        "text": "CITED",
                        "citations": [{"type": "char_location", "cited_text": "x"}],
                        "cache_control": {"type": "ephemeral"},
                    }
                ],
            }
        ],
        ["CITED"],
    ),
    (
        "messages",
        [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": [1]}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": {"n": 1}},
                    {"type": "tool_result", "tool_use_id": "b"},
                ],
            },
        ],
        ['{"n": 1}'],
    ),
]

NOTE = {"type": "text", "media_type": "text/plain", "data": "Tea is green."}
WORDS = "VGVhIGlzIGdyZWVuLg=="  # Tea is green.
GREEN = "Tea is gr\u00fcn."


def base64_of(data, head=""):
    return head + base64.b64encode(data).decode()


# Media types that browsers and clients state for programs, tables, logs and settings, and for unknown files.
KINDS = ["", "text/x-python-script", "application/javascript", "application/x-sh", "application/toml", "video/mp2t"]
KINDS += [
    "application/octet-stream",
    "application/vnd.ms-excel",
    "application/x-yaml",
    "image/svg+xml",
    "application/sql",
]
FILES = [base64_of(GREEN.encode(), f"data:{kind};base64,") for kind in KINDS]
FILES += [base64_of(GREEN.encode(code)) for code in ("utf-8", "utf-8-sig", "utf-16")]
FILES += [
    f"data:text/plain;charset=utf-8,{quote(GREEN)}",
    base64_of(GREEN.encode(), "data:TEXT/plain;charset=utf-8;base64,"),
]
# Files of other formats, also where the name or the media type is one of text.
NO_TEXTS = [
    base64_of(data) for data in (b"%PDF-1.4\n", b"PK\x03\x04", b"\x89PNG\r\n\x1a\n", b"\xff\xfb\x90", b"a\0b")
]
NO_TEXTS += [
    base64_of(b"hi", f"data:{kind};base64,") for kind in ("application/pdf", "audio/mpeg", "image/png", "video/mp4")
]
# Documents with inline text, and their lines in the prompt.
DOCUMENTS = [
    ("messages", {"type": "document", "source": NOTE}, ["Tea is green."]),
    (
        "messages",
        {"type": "document", "title": "note.txt", "context": "Of May", "source": NOTE},
        ["note.txt", "Of May", "Tea is green."],
    ),
    ("messages", {"type": "document", "source": {"type": "content", "content": "Tea is green."}}, ["Tea is green."]),
    (
        "messages",
        {
            "type": "document",
            "title": "T",
            "source": {
                "type": "content",
                "content": [{"type": "text", "text": "Tea is"}, {"type": "text", "text": "green."}],
            },
        },
        ["T", "Tea is", "green."],
    ),
    (
        "messages",
        {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": WORDS}},
        ["Tea is green."],
    ),
    (
        "messages",
        {
            "type": "search_result",
            "title": "Tea",
            "source": "https://tea.example",
            "content": [{"type": "text", "text": "Tea is green."}],
            "citations": {"enabled": True},
        },
        ["Tea", "https://tea.example", "Tea is green."],
    ),
    (
        "chat",
        {"type": "file", "file": {"filename": "note.md", "file_data": f"data:text/markdown;base64,{WORDS}"}},
        ["note.md", "Tea is green."],
    ),
    ("chat", {"type": "file", "file": {"filename": "note.txt", "file_data": WORDS}}, ["note.txt", "Tea is green."]),
    (
        "responses",
        {"type": "input_file", "filename": "a.json", "file_data": "data:application/json;base64,e30="},
        ["a.json", "{}"],
    ),
    *(("chat", {"type": "file", "file": {"filename": "a.go", "file_data": each}}, ["a.go", GREEN]) for each in FILES),
    *(("responses", {"type": "input_file", "file_data": each}, [GREEN]) for each in FILES),
    (
        "messages",
        {"type": "document", "source": {"type": "base64", "media_type": "application/javascript", "data": WORDS}},
        ["Tea is green."],
    ),
]
