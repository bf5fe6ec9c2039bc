"""List all request fields and their treatment, for the server and its documentation."""

import difflib
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from .fields import Refused, check_size

APIS = ("chat", "completions", "responses", "messages")
TREATMENTS = {"h": "honoured", "i": "ignored hint", "w": "warning", "r": "refused", "-": "unknown"}
NEUTRAL = (None, False, [], {}, "")  # values that ask for nothing: they are neither refused nor named in a warning
FORMATS = "type text, json_object or json_schema"
SCHEMA = "use `response_format` or vLLM's `guided_json`, `guided_regex`, `guided_grammar`, `guided_choice`"
STORED = "nothing is stored; send the whole conversation"
MOST_NAMED = 20  # unknown fields that warnings name: the search for similar names takes about a millisecond each


class Field(NamedTuple):
    """A request field and its treatment by each API.

    letters: of TREATMENTS, one for each of APIS. note: for documentation, and the error of a refused field.
    neutral: values that ask for nothing, in addition to NEUTRAL.
    """

    letters: str
    note: str = ""
    neutral: tuple[Any, ...] = ()

    def treatment(self, api: str) -> str:
        return TREATMENTS[self.letters[APIS.index(api)]]


def _alike(letters: str, names: str, note: str = "", neutral: tuple[Any, ...] = ()) -> dict[str, Field]:
    return dict.fromkeys(names.split(), Field(letters, note, neutral))


FIELDS: dict[str, Field] = {
    # Prompt
    "model": Field("hhhh", "a name of the served model, or `name:adapter`"),
    "adapter": Field("hhhh", "name of an adapter of `--adapter-path`"),
    "messages": Field("h--h"),
    "prompt": Field("-hr-", "completions: a string, token ids, or a list of either; responses: " + STORED),
    "input": Field("--h-", "text or items"),
    "instructions": Field("--h-"),
    "system": Field("---h"),
    "continue_final_message": Field("h-hh", "default: true if the last message is the assistant's"),
    "add_generation_prompt": Field("h-hh", "false: the prompt ends with the last message"),
    "chat_template_kwargs": Field("h-hh", "variables of the chat template"),
    "stream": Field("hhhh"),
    "stream_options": Field("hhi-"),
    "stream_options.include_usage": Field("hhi-"),
    **_alike("iii-", "stream_options.include_obfuscation stream_options.continuous_usage_stats"),
    "return_progress": Field("hhii", "a streamed chunk with `prompt_progress` after each chunk of the prefill"),
    # Number and length of choices
    "n": Field("hh--"),
    "best_of": Field("-h--", "must equal `n`"),
    "max_tokens": Field("hhhh", "-1: no limit; values that do not fit are reduced"),
    "max_completion_tokens": Field("h---", "as `max_tokens`"),
    "max_output_tokens": Field("--h-", "as `max_tokens`"),
    "n_predict": Field("hhhh", "as `max_tokens`"),
    "min_tokens": Field("hhhh", "no end-of-text or stop token before; stop strings still end the answer"),
    "ignore_eos": Field("hhhh", "no end-of-text token"),
    "stop": Field("hhh-", "a string or up to 64 of them"),
    "stop_sequences": Field("---h", "up to 64 strings"),
    "stop_token_ids": Field("hhhh", "tokens that end the answer and are not part of its text"),
    # Sampling
    **_alike("hhhh", "temperature top_p min_p"),
    "top_k": Field("hhhh", "0 or -1: off"),
    "min_tokens_to_keep": Field("hhhh", "minimum number of tokens that `min_p` keeps"),
    "min_keep": Field("hhhh", "as `min_tokens_to_keep`"),
    "xtc_probability": Field("hhhh", "no effect at temperature 0"),
    "xtc_threshold": Field("hhhh", "above 0.5: XTC is off"),
    "seed": Field("hhhh", "-1: none"),
    "repetition_penalty": Field("hhhh"),
    "repeat_penalty": Field("hhhh", "as `repetition_penalty`"),
    "repetition_context_size": Field("hhhh", "number of last tokens (20)"),
    "repeat_last_n": Field("hhhh", "as `repetition_context_size`; -1: all, 0: no penalty"),
    **_alike("hhhh", "presence_penalty frequency_penalty"),
    **_alike("hhhh", "presence_context_size frequency_context_size", "number of last tokens (20)"),
    "logit_bias": Field("hhhh"),
    "bad_words": Field("hhhh", "strings that the answer does not contain"),
    "allowed_token_ids": Field("hhhh", "the only tokens besides end-of-text and stop tokens"),
    "logprobs": Field("hh--"),
    "top_logprobs": Field("h-r-", "needs `logprobs`", (0,)),
    # Tools
    "tools": Field("h-hh", "functions; other types next to them are left out, with a warning"),
    "tool_choice": Field("h-hh", "auto, none, required (any), a tool, allowed_tools; forced calls fit their schemas"),
    "tool_choice.type": Field("h-hh"),
    "tool_choice.name": Field("h-hh"),
    **_alike("h-h-", "tool_choice.function tool_choice.allowed_tools tool_choice.mode tool_choice.tools"),
    "tool_choice.disable_parallel_tool_use": Field("---h"),
    "parallel_tool_calls": Field("h-h-", "false: one call"),
    "max_tool_calls": Field("--i-", "limits built-in tools only"),
    **_alike("r---", "functions function_call", "use `tools`", ("auto", "none")),
    # Thinking
    "enable_thinking": Field("h-hh"),
    "thinking": Field("h-hh", "an object, or true or false"),
    "thinking.type": Field("h-hh", "enabled, disabled; adaptive and auto: the model's default"),
    "thinking.budget_tokens": Field("h-hh", "0 switches thinking off; the header names another one: no effect"),
    **_alike("i-ii", "thinking.display thinking.clear_thinking"),
    "think": Field("h-hh", "true, false, or a reasoning effort"),
    "reasoning_effort": Field("h-hh", "none switches thinking off; other values go to templates that read them"),
    "reasoning": Field("h-hh"),
    "reasoning.effort": Field("h-hh", "as `reasoning_effort`"),
    "reasoning.enabled": Field("h-hh"),
    "reasoning.max_tokens": Field("h-hh", "as `thinking.budget_tokens`"),
    "reasoning.exclude": Field("w-ww"),
    **_alike("i-ii", "reasoning.summary reasoning.generate_summary"),
    **_alike("i-ii", "reasoning.context reasoning.mode include_reasoning"),
    **_alike(
        "h-hh",
        "thinking_budget reasoning_budget thinking_budget_tokens thinking_token_budget max_thinking_tokens",
        "as `thinking.budget_tokens`",
    ),
    # Structured output
    "response_format": Field(
        "hhrr", FORMATS + "; responses: use `text.format`, messages: `output_config.format`", ({"type": "text"},)
    ),
    "text": Field("--h-"),
    "text.format": Field("--h-", FORMATS),
    "text.verbosity": Field("--i-"),
    "output_config": Field("---h"),
    "output_config.format": Field("---h", FORMATS),
    "output_config.effort": Field("---i"),
    "output_config.task_budget": Field("---w"),
    "output_format": Field("---h", "as `output_config.format`"),
    "guided_json": Field("hhhh", "a JSON schema, or its text"),
    "guided_regex": Field("hhhh", "a regular expression in Rust's syntax"),
    "guided_choice": Field("hhhh", "a list of texts, one of which is the answer"),
    "guided_grammar": Field("hhhh", "a Lark grammar in llguidance's dialect"),
    "structured_outputs": Field("hhhh", "an object with one of json, json_object, regex, choice, grammar"),
    "guided_whitespace_pattern": Field("hhhh", "a regular expression; default: at most one space behind , and :"),
    **_alike("rrrr", "grammar json_schema regex ebnf structural_tag format guided_decoding", SCHEMA),
    "guided_decoding_backend": Field("iiii", "it is always llguidance"),
    # Other output, and state
    "modalities": Field("h---", "text"),
    "audio": Field("r---"),
    "web_search_options": Field("r---"),
    "echo": Field("rr--"),
    "suffix": Field("-r--"),
    "include": Field("--h-", "log probabilities are refused, other values ignored"),
    **_alike("--r-", "previous_response_id conversation", STORED),
    "background": Field("--r-", STORED),
    "thread": Field("---r", STORED),
    "compaction": Field("---r"),
    **_alike("---r", "container mcp_servers"),
    "metadata": Field("iihi", "responses: returned"),
    # Other servers' parameters that change the answer
    **_alike("rrrr", "use_beam_search early_stopping include_stop_str_in_output logits_processors adapters lora"),
    **_alike("rrrr", "prompt_logprobs return_token_ids return_tokens_as_token_ids vllm_xargs samplers"),
    **_alike("rrrr", "mirostat mirostat_mode dry_multiplier dynatemp_range n_probs post_sampling_probs top_a"),
    "top_n_sigma": Field("rrrr", "", (-1,)),
    **_alike("rrrr", "typical_p tfs_z length_penalty", "allowed is 1", (1,)),
    "skip_special_tokens": Field("rrrr", "allowed is true", (True,)),
    "add_special_tokens": Field("ir--", "allowed is true", (True,)),
    **_alike("r-rr", "chat_template documents role_mapping"),
    **_alike("rrrr", "plugins truncate_prompt_tokens"),
    # Hints
    **_alike("iiii", "user service_tier store safety_identifier priority request_id cache_salt cache_control"),
    **_alike("iiii", "prompt_cache_key prompt_cache_options prompt_cache_retention moderation speed inference_geo"),
    **_alike("ii--", "prediction verbosity"),
    **_alike("--i-", "truncation background_options access_programs image client_metadata"),
    **_alike("--ii", "context_management"),
    **_alike("---i", "betas billing_policy diagnostics fallback_credit_token fallbacks user_profile_id workspace_id"),
    **_alike("iiii", "provider models route transforms usage keep_alive num_ctx"),
    **_alike("iiii", "kv_transfer_params mm_processor_kwargs"),
    **_alike("iiii", "cache_prompt id_slot n_keep n_cache_reuse timings_per_token"),
    **_alike("iiii", "num_draft_tokens draft_model", "the text is the same"),
    **_alike("iiii", "spaces_between_special_tokens"),
    **_alike(
        "iiii",
        "mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers"
        " dynatemp_exponent",
        "no effect by itself",
    ),
}  # fmt: skip
UNKNOWN = Field("----")
PARENTS = {name.partition(".")[0] for name in FIELDS if "." in name}


def check_fields(api: str, body: dict[str, Any]) -> list[str]:
    """Return a list of warnings of fields without effect, of unknown ones the first MOST_NAMED by name.

    Members of the objects that FIELDS lists with a dot are checked too. Of the values of honoured fields only the
    size is checked. Raises Refused for a refused field unless its value is neutral, and as `check_size`.
    """
    unknown: list[str] = []
    warnings: list[str] = []
    for param, given in body.items():
        treatments = {param: _checked(api, param, given, param)}
        if treatments[param] == "honoured" and param in PARENTS and isinstance(given, dict):
            names = ((f"{param}.{inner}", value) for inner, value in given.items())
            treatments |= {name: _checked(api, name, value, param) for name, value in names}
        unknown += [name for name, treatment in treatments.items() if treatment == "unknown"]
        warnings += [f"{name} has no effect" for name, treatment in treatments.items() if treatment == "warning"]
    return [*warnings, *unknown_names("field", unknown, partial(_suggestion, api))]


def unknown_names(kind: str, names: list[str], suggestion: Callable[[str], str] = lambda name: "") -> list[str]:
    """Return a list of warnings of names that are unknown, the first MOST_NAMED each with its suggestion."""
    found = [f"unknown {kind} {name[:80]!r} is ignored{suggestion(name)}" for name in names[:MOST_NAMED]]
    more = len(names) - len(found)
    return [*found, *([f"{more} more {kind}s are unknown and ignored"] if more else [])]


def _checked(api: str, name: str, value: Any, param: str) -> str:
    """Return a field's treatment; "" for a value that asks for nothing. Raises Refused as `check_fields`.

    param: the body's field; `name` may be a member of its object.
    """
    field = FIELDS.get(name, UNKNOWN)
    treatment = field.treatment(api)
    neutral = treatment in ("refused", "warning") and value in (*NEUTRAL, *field.neutral)
    if treatment == "refused" and not neutral:
        raise Refused(f"{name}: {field.note or 'not supported; leave it out'}", param=param)
    if treatment == "honoured" and name == param:
        check_size(name, value)
    return "" if neutral else treatment


def _suggestion(api: str, name: str) -> str:
    """Return the end of a warning that names the known field most similar to an unknown one; "" if none is."""
    known = [each for each, field in FIELDS.items() if field.treatment(api) in ("honoured", "ignored hint")]
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", name[:80]).lower()
    near = difflib.get_close_matches(snake, known, 1, 0.7) or [n for n in known if n.startswith(f"{snake}_")][:1]
    return f"; did you mean {near[0]!r}?" if near else ""
