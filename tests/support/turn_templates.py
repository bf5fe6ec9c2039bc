"""How released chat templates write turns: the parts that matter for the end of an answer, and special tokens."""


def by_role(user, assistant, prompt="", before="", after=""):
    """A template of a user's and an assistant's turn, with `m`, and the text that begins an answer."""
    turns = "{% for m in messages %}{% if m.role == 'user' %}" + user + "{% else %}" + assistant + "{% endif %}"
    asked = "{% if add_generation_prompt %}" + prompt + "{% endif %}" if prompt else ""
    return before + turns + "{% endfor %}" + after + asked


CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
SYSTEM = "<|im_start|>system\nYou help.<|im_end|>\n"
LLAMA = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
GEMMA = "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content | trim }}<end_of_turn>\n"
THOUGHT = "{% if m.reasoning_content %}<reason>\n{{ m.reasoning_content }}\n</reason>\n\n{% endif %}"
ANALYSIS = (
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
)
HARMONY_USER = "<|start|>user<|message|>{{ m.content }}<|end|>"
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
GLM = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")
IM = ("<|im_start|>", "<|im_end|>")
DEEPSEEK = tuple(f"<\uff5c{name}\uff5c>" for name in ("User", "Assistant", "end\u2581of\u2581sentence"))
QWEN = "<|im_start|>assistant\n" + THOUGHT + "{{ m.content }}<|im_end|>\n"
AI = "<|im_start|>assistant\n"
END_OF_TEXT = "<|endoftext|>"  # of the base model
FINISHED = "{% if not add_generation_prompt %}" + END_OF_TEXT + "{% endif %}"
MINIMAX = "]~b]ai\n" + THOUGHT + "{{ m.content }}[e~[\n"
PHI = "<|user|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n{{ m.content }}<|end|>\n"
# (template, special tokens, the token that ends answers), by the family that writes turns so.
ENDED = {
    "ChatML": (by_role(CHATML, CHATML, "<|im_start|>assistant\n"), IM, "<|im_end|>"),
    "Qwen": (by_role(CHATML, QWEN, before=SYSTEM), IM, "<|im_end|>"),
    "Step": (by_role(CHATML, CHATML, before="{{ bos_token }}" + SYSTEM), (*IM, "<im_patch>"), "<|im_end|>"),
    "Llama 3": (
        by_role(LLAMA, LLAMA, before="{{ bos_token }}"),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        "<|eot_id|>",
    ),
    "Gemma": (by_role(GEMMA, GEMMA, before="{{ bos_token }}"), ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "DeepSeek": (
        by_role(
            DEEPSEEK[0] + "{{ m.content }}", DEEPSEEK[1] + "{{ m.content }}" + DEEPSEEK[2], before="{{ bos_token }}"
        ),
        DEEPSEEK,
        DEEPSEEK[2],
    ),
    "Mistral": (
        by_role("[INST] {{ m.content }}[/INST]", " {{ m.content | trim }}</s>", before="{{ bos_token }}"),
        ("[INST]", "[/INST]", "</s>"),
        "</s>",
    ),
    "Llama 2": (by_role("{{ bos_token }}[INST] {{ m.content }} [/INST]", " {{ m.content }} </s>"), ("</s>",), "</s>"),
    "Phi": (by_role(*PHI, after="{{ eos_token }}"), ("<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
    "Kimi": (
        by_role(
            "<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>{{ m.content }}<|im_end|>",
        ),
        ("<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    "MiniMax": (
        by_role("]~b]user\n{{ m.content }}[e~[\n", MINIMAX, before="]~!b["),
        ("]~!b[", "]~b]", "[e~["),
        "[e~[",
    ),
    "always with a prompt": (by_role(CHATML, CHATML, after="<|im_start|>assistant\n"), IM, "<|im_end|>"),
    "the end of text in front": (END_OF_TEXT + by_role(CHATML, CHATML, AI), IM, "<|im_end|>"),
    "the end of text behind all": (by_role(CHATML, CHATML, AI, after=FINISHED), IM, "<|im_end|>"),
    "the end of text in a comment": ("{# pad: <|endoftext|> #}" + by_role(CHATML, CHATML), IM, "<|im_end|>"),
    "an answer's end of its own": (
        by_role("[INST]{{ m.content }}[/INST]", "{% generation %}{{ m.content }}<|eot|>{% endgeneration %}"),
        ("[INST]", "[/INST]", "<|eot|>"),
        "<|eot|>",
    ),
    "several templates": ({"default": by_role(CHATML, CHATML), "tool_use": "x"}, IM, "<|im_end|>"),
}
NOT_ENDED = {
    "GLM": (by_role("<|user|>\n{{ m.content }}", "<|assistant|>\n" + THOUGHT + "{{ m.content }}"), GLM),
    "gpt-oss": (by_role(HARMONY_USER, ANALYSIS + "{{ '<|return|>' if loop.last else '<|end|>' }}"), HARMONY),
    "gpt-oss, each part alike": (by_role(HARMONY_USER, ANALYSIS + "<|end|>"), HARMONY),
    "no end": (by_role("<|user|>{{ m.content }}", "<|assistant|>{{ m.content }}"), GLM),
    "no end, always with a prompt": (
        by_role("<|im_start|>user\n{{ m.content }}\n", AI + "{{ m.content }}\n", after=AI),
        IM,
    ),
    "an end of plain text": (by_role("U: {{ m.content }}\n", "A: {{ m.content }}### END\n"), IM),
    "the text's beginning": (by_role("U {{ m.content }}", "A {{ m.content }}<|bos|>"), ("<|bos|>",)),
    "refused": ("{{ raise_exception('no') }}<|im_end|>", IM),
    "no answers": (by_role(CHATML, "<|im_end|>"), IM),
    "no template": (None, IM),
}
