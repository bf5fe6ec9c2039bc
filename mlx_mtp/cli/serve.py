"""Define `mlx-mtp serve`: serve one or several models with OpenAI's, Anthropic's and Ollama's APIs."""

import contextlib
import json
import logging
import sys
import threading
import time
import urllib.request
import webbrowser
from functools import partial
from pathlib import Path
from typing import Any

import click
from click import FloatRange, IntRange, option
from click.core import ParameterSource

from ..machine.errors import install
from . import options
from .advice import advised_sampling
from .agent import KeepsWords, agent_options, install_agent
from .given_file import SIZE
from .together import check_flags, follows

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NAME = "mlx-mtp-demo"
ANSWERS = 20.0  # seconds to wait until the server answers its first request
# Flags for how, not what, the server decodes.
DECODING = "num_draft_tokens", "tree", "draft_sampling", "adaptive", "draft_p_min", "prompt_lookup", "compile_cycles"
# Flags with files that belong to one model.
OF_ONE = ("adapter_path", "draft_model", "draft_vocab", "mtp_path", "config_from", "vision_path")

several_models_options = options.options(
    option("--model", "models", multiple=True, help=f"{options.MODEL}  Repeatable: requests choose one by its name."),
    option(
        "--models-dir",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Serve all models in this folder and up to four levels below; requests choose one by its name.",
    ),
    option(
        "--max-memory",
        type=SIZE,
        help="With several models: maximum memory after a load, such as 8GB; the least recently used are unloaded "
        "for it.  [default: the memory that is free at the start]",
    ),
    options.code_option,
    options.loading_options,
)
picture_options = options.options(
    option(
        "--fetch-images",
        multiple=True,
        metavar="HOST[:PORT]",
        help="Host from which pictures of requests may be downloaded; repeatable.  [default: none]",
    ),
    options.typed(
        "--vision-cache", SIZE, "512MB", "Maximum size of pictures' features that are kept, such as 512MB or 2GB."
    ),
)


@click.command(cls=KeepsWords)
@several_models_options
@picture_options
@option("--host", default="127.0.0.1", help="Address to listen on; `::1` and `::` are IPv6.")
@option("--port", type=IntRange(1, 65535), default=8080, help="Port to listen on.")
@option("--api-key", envvar="MLX_MTP_API_KEY", show_envvar=True, help="Key that clients must send.")
@option("--no-auth", is_flag=True, help="Allow an address other than loopback without --api-key.")
@option("--alias", multiple=True, help="Model name that requests may use, '*' for any; repeatable.")
@option("--allow-host", multiple=True, help="Additional allowed Host header; repeatable.")
@option("--cors-origin", multiple=True, help="Origin of web pages that may send requests, '*' for all; repeatable.")
@option("--root-path", default="", help="Path under which a reverse proxy serves this.")
@option("--max-body", type=FloatRange(0.001), default=32.0, help="Maximum MB of a request.")
@option("--timeout", type=FloatRange(0, min_open=True), help="Maximum seconds of a request.  [default: none]")
@option("--grace", type=FloatRange(0), default=5.0, help="Seconds that responses may take to finish after Ctrl-C.")
@option("--parallel", type=IntRange(1), default=8, help="Maximum number of active requests.")
@option("--queue", type=IntRange(0), default=64, help="Maximum number of queued requests.")
@option("--idle-unload", type=FloatRange(0, min_open=True), help="Idle seconds after which the model is unloaded.")
@option("--prompt-cache-size", type=FloatRange(0), default=4.0, help="Maximum GB of the prefix cache; 0 disables it.")
@option(
    "--prompt-cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory that stores the prefix cache.",
)
@option("--log-file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the log to this file.")
@options.text_options(max_tokens=-1)
@options.template_config_option
@option("--use-default-chat-template", is_flag=True, help="Use the default template of the tokenizer's class.")
@option("--extra-eos-token", multiple=True, help="Another token that ends the text; repeatable.")
@options.cache_options
@option("--open", "opens", is_flag=True, help="Open the chat page in the browser once the model is loaded.")
@options.options(*agent_options)
@option("--quiet", is_flag=True, help="No banner, and no line per response.")
@click.pass_context
def serve(ctx: click.Context, **flags: Any) -> None:
    """Serve OpenAI's, Anthropic's and Ollama's HTTP APIs.

    With --models-dir or several --model, a request's model is loaded when it is first named. The first Ctrl-C ends
    the server once responses have finished, after at most --grace seconds; the second ends it at once. Sampling flags
    apply to requests that leave the field out, and override the checkpoint's generation_config.json.
    """
    try:
        from ..checkpoint.adapters import by_name
        from ..serve.follow import follow
        from ..serve.server import serve as run
        from ..serve.server import serve_several, shared
    except ModuleNotFoundError as e:
        raise click.ClickException(f"{e.name} is missing: {install('serve')}") from None
    check_flags(prompt_cache_dir=flags["prompt_cache_dir"], idle_unload=flags["idle_unload"])
    if flags["host"] not in LOOPBACK and not flags["api_key"] and not flags["no_auth"]:
        raise click.UsageError(
            f"--host {flags['host']} can be reached from other machines; give --api-key or --no-auth"
        )
    several = _is_several(flags)
    if flags["install_agent"]:
        return install_agent(ctx, _address(flags))
    if len(flags["adapter_path"]) > 1:
        flags["adapter_path"] = by_name(flags["adapter_path"])
    _log_to(flags["log_file"], quiet=flags["quiet"])
    flags["root_path"] = "".join(f"/{part}" for part in flags["root_path"].split("/") if part)
    settings, ready = _settings(ctx, flags, several=several), partial(_loaded, flags=flags)
    if several:
        find = partial(_find, flags)
        serve_several(find, lambda offer: _load(ctx, {**flags, "model": str(offer.path)}), settings, ready)
    elif follows():
        follow(shared(_load(ctx, flags), settings))
    else:
        run(lambda: _load(ctx, flags), settings, ready)


def _settings(ctx: click.Context, flags: dict[str, Any], *, several: bool) -> Any:
    """Return the server's `Settings` for the command's flags. several: it is for several models."""
    from ..serve.engine import JobLimits
    from ..serve.guard import Rules
    from ..serve.prefix_files import PrefixFiles
    from ..serve.server import Settings

    size = int(flags["prompt_cache_size"] * 1e9)
    files = PrefixFiles(flags["prompt_cache_dir"], size) if flags["prompt_cache_dir"] else None
    given = [
        name
        for name in (*options.sampling_flags(flags), "seed")
        if ctx.get_parameter_source(name) != ParameterSource.DEFAULT
    ]
    return Settings(
        names=flags["alias"] if several else _names(flags["model"], flags["alias"]),
        host=flags["host"],
        port=flags["port"],
        rules=Rules(flags["api_key"], flags["allow_host"], flags["cors_origin"], int(flags["max_body"] * 1e6)),
        options={name: flags[name] for name in DECODING},
        sampling={name: flags[name] for name in given},
        template=flags["chat_template_config"],
        step=flags["prefill_step_size"],
        positions=flags["max_context"],
        max_tokens=None if flags["max_tokens"] < 0 else flags["max_tokens"],
        cache_bytes=size,
        cache_files=files,
        limits=JobLimits(flags["parallel"], flags["queue"] + flags["parallel"], flags["idle_unload"] or float("inf")),
        timeout=flags["timeout"] or float("inf"),
        grace=flags["grace"],
        root_path=flags["root_path"],
        fetch=tuple(host.lower() for host in flags["fetch_images"]),
        features=flags["vision_cache"],
        max_memory=flags["max_memory"],
    )


def _is_several(flags: dict[str, Any]) -> bool:
    """Return whether the server is for several models; if not, set the flag `model` to the one model or None.

    Raises UsageError for flags of one model (OF_ONE) with several models, for --max-memory with one model, for
    several models on several ranks, and if --models-dir is itself a model.
    """
    several = len(flags["models"]) > 1 or flags["models_dir"] is not None
    if not several:
        flags["model"] = next(iter(flags["models"]), None)
        if flags["max_memory"] is not None:
            raise click.UsageError("--max-memory: needs --models-dir or several --model")
        return False
    check_flags(models_dir=flags["models_dir"], model=flags["models"])
    options.refuse(flags, OF_ONE, "{} belongs to one model; with several models leave it out")
    if flags["models_dir"] and (flags["models_dir"] / "config.json").is_file():
        raise click.UsageError(f"--models-dir {flags['models_dir']} is a model itself; give it with --model")
    return True


def _find(flags: dict[str, Any]) -> list[Any]:
    """Return `ModelFacts` for each --model, as ordered in the command, then for each model in --models-dir.

    A --model of the hub is downloaded. Raises UsageError if two models have the same name in requests.
    """
    from ..serve.catalog import offers

    paths = [
        options.own_path(model, code=bool(flags["trust_remote_code"]), quiet=bool(flags.get("quiet")))
        for model in flags["models"]
    ]
    named = [(_names(model, ())[0], path) for model, path in zip(flags["models"], paths, strict=True)]
    found = offers(named, flags["models_dir"], flags["max_context"], code=bool(flags["trust_remote_code"]))
    names = [offer.name for offer in found]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise click.UsageError(f"two models are named {double!r}; leave one out, or rename its directory")
    return found


def _names(model: str | None, given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that requests may use: those given, after the model's own if none is given but "*"."""
    own = NAME if model is None else Path(model).resolve().name if Path(model).is_dir() else model
    return given if set(given) - {"*"} else (own, *given)


def _log_to(file: Path | None, *, quiet: bool) -> None:
    """Write the log to stderr, with quiet only warnings, and all of it to a file if one is given."""
    log = logging.getLogger("mlx_mtp.serve")
    log.setLevel(logging.INFO)
    log.propagate = False
    shown = logging.StreamHandler(sys.stderr)
    shown.setLevel(logging.WARNING if quiet else logging.INFO)
    log.handlers = [shown, *([logging.FileHandler(file)] if file else ())]
    for handler in log.handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))


def _load(ctx: click.Context, flags: dict[str, Any]) -> Any:
    """Return the `Loaded` model that the flags describe; called in the thread that will use it."""
    from ..serve.server import Loaded

    with ctx.scope(cleanup=False):
        model, tokenizer = options.load_model(flags)
    path = options.own_path(flags["model"])
    advised = advised_sampling(options.checkpoint_path(str(path), flags=flags))
    advised["xtc_special_tokens"] = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
    return Loaded(model, tokenizer, advised, options.cache_layout(flags), path)


def _loaded(service: Any, flags: dict[str, Any]) -> None:
    """Print the banner unless --quiet is given, and open the chat page with --open."""
    if not flags["quiet"]:
        _banner(service, flags)
    if flags["opens"]:
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(flags["host"], flags["host"])
        address = _address({**flags, "host": here})
        threading.Thread(target=_open_page, args=(address,), daemon=True).start()


def _address(flags: dict[str, Any]) -> str:
    host = flags["host"]
    return f"http://{f'[{host}]' if ':' in host else host}:{flags['port']}{flags['root_path']}"


def _open_page(address: str) -> None:
    """Open the chat page in the browser once the server at `address` answers; give up after ANSWERS seconds."""
    until = time.monotonic() + ANSWERS
    while time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=ANSWERS):
            if not webbrowser.open(f"{address}/"):
                click.echo(f"No browser can be opened here; the chat is at {address}/", err=True)
            return
        time.sleep(0.1)


def _banner(service: Any, flags: dict[str, Any]) -> None:
    """Print on stderr the server's address, its model or models, and a request that works."""
    address = _address(flags)
    key = " -H 'Authorization: Bearer KEY'" if flags["api_key"] else ""
    question: Any = {"messages": [{"role": "user", "content": "What does len do?"}], "max_tokens": 60}
    if service.models:
        from ..decoding.memory_needs import UNCHECKED

        offers = service.offers()
        click.echo(f"{len(offers)} models at {address} · a chat at {address}/", err=True)
        for offer in offers:
            need = f"{offer.needed / 1e9:.2f} GB with {min(offer.context, UNCHECKED):,} tokens"
            click.echo(f"  {offer.name} · {offer.context:,} positions · {need}", err=True)
        question["model"] = offers[0].name
    else:
        names = service.info
        click.echo(f"{names.name} at {address} · {names.positions:,} positions · a chat at {address}/", err=True)
        if report := getattr(service.engine.served.model, "report", None):
            click.echo(str(report), err=True)
    body = json.dumps(question)
    click.echo(f"curl{key} {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", err=True)
