"""`anytorch generate`: continue a text or answer a message with a language model; the output streams."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from anytorch import limits
from anytorch.cli.output import Output
from anytorch.cli.parser import number
from anytorch.counts import counted


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - for standard input")
    parser.add_argument("--model", metavar="MODEL", help="a folder with config.json, tokenizer.json and safetensors weights "
                        "or a model on the Hugging Face Hub (default: the small one that comes with anytorch)")  # fmt: skip
    parser.add_argument("--chat", action="store_true", help="the prompt is a message: use the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system message (with --chat)")
    parser.add_argument(
        "--max-tokens",
        type=number(limits.NEW_TOKENS),
        default=256,
        metavar="N",
        help="most tokens to generate (default: 256)",
    )
    parser.add_argument(
        "--temperature", type=number(limits.TEMPERATURE), metavar="T",
        help="0 for the most likely text (default: the model's own setting)",
    )  # fmt: skip
    parser.add_argument(
        "--top-p",
        type=number(limits.SHARE),
        metavar="P",
        help="draw only from the likeliest tokens whose probabilities add up to P",
    )
    parser.add_argument("--top-k", type=number(limits.TOP_K), metavar="K", help="only the K likeliest tokens")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated")
    parser.add_argument("--seed", type=number(limits.SEED), metavar="N", help="the same seed gives the same text")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda, cuda:1, vulkan, …")
    parser.add_argument("--dtype", default="auto", metavar="DTYPE", help="auto, float32, float16, bfloat16")
    parser.add_argument("--quantization", metavar="KIND", help="int8, int4, int2 or fp4")
    parser.add_argument("--device-budget", metavar="SIZE", help="device memory the weights may use, such as 8GiB; the rest "
                        "of the model is streamed for every token")  # fmt: skip
    parser.add_argument(
        "--explain", action="store_true", help="also explain which device is used and what limits its speed"
    )


def run(options: argparse.Namespace, output: Output) -> int:
    from anytorch.errors import UsageError
    from anytorch.text.generate import TextGenerator
    from anytorch.text.generate.loading import TINY

    if options.system is not None and not options.chat:
        raise UsageError("--system needs --chat", hint="put it before the prompt, or add --chat")
    check(options)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with output.fallbacks_told(), output.waiting(f"loading {options.model or TINY}"):
        generator = TextGenerator(
            options.model,
            options.device,
            options.dtype,
            options.quantization,
            options.device_budget,
        )
    with (
        generator,
        generator.stream(
            messages(prompt, options.system) if options.chat else prompt,
            options.max_tokens,
            options.temperature,
            options.top_p,
            options.top_k,
            options.stop,
            options.seed,
        ) as stream,
    ):
        pieces = []
        for piece in stream:
            pieces.append(piece)
            output.piece(piece)
        output.text()
        rate = f" ({stream.tokens_per_second:,.1f} tokens/s" if stream.tokens_per_second else ""
        if rate:
            share = stream.bandwidth_share
            rate += f", {share:.0%} of the memory bandwidth)" if share is not None else ")"
        output.note(
            f"{counted(stream.completion_tokens, 'token')} in {stream.seconds:.1f} s{rate} on {generator.device}"
        )
        if options.explain:
            output.note(generator.explain())
        if output.json:
            output.data({"text": "".join(pieces), **facts(stream), "generator": generator.describe()})
    return 0


def check(options: argparse.Namespace) -> None:
    """Check what can be checked before a model is loaded, which may take minutes. Raises UsageError or ModelError."""
    from anytorch.cli.requests import named_device
    from anytorch.errors import InputError, UsageError
    from anytorch.quant.formats import parse
    from anytorch.settings import parse_nbytes
    from anytorch.text.generate.loading import DTYPES, find_folder
    from anytorch.text.generate.prompts import check_stop

    named_device(options.device, "--device")
    check_stop(options.stop)
    if options.dtype not in DTYPES:
        raise UsageError(f"--dtype {options.dtype}: use one of {', '.join(DTYPES)}")
    if options.quantization is not None:
        parse(options.quantization)
    if options.device_budget is not None:
        try:
            parse_nbytes(options.device_budget)
        except ValueError as exc:
            raise UsageError(f"--device-budget {options.device_budget}: {exc}") from exc
    if options.prompt == "":
        raise InputError("the prompt is empty", hint="give the text to continue, or - for standard input")
    folder = find_folder(options.model)
    if options.chat and not has_chat_template(folder):
        raise UsageError(
            f"--chat: the model {options.model} has no chat template: it can continue a text, but not answer messages",
            hint="leave --chat out, or use a model that was trained for chats",
        )


def has_chat_template(folder: Path) -> bool:
    """True if one of the files in which transformers looks for a chat template has one, or cannot be read here."""
    import json

    if any(folder.glob("chat_template.*")) or (folder / "additional_chat_templates").is_dir():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):
        return True  # loading it says what is wrong


def messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def facts(stream: Any) -> dict[str, Any]:
    names = ("finish_reason", "prompt_tokens", "completion_tokens", "seconds", "first_token_s")
    return {name: getattr(stream, name) for name in (*names, "tokens_per_second", "bandwidth_share")}
