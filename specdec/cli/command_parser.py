"""The parser of the command line: usage errors are one line, and flags of other programs get a hint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from specdec.contract.errors import InvalidRequest, SpecdecError, error_line

_SERVING_HINTS = {
    **dict.fromkeys(("--model", "-m", "-hf", "--hf-repo"), "--target PATH_OR_HUB_ID"),
    **dict.fromkeys(("--port", "--host"), "--http HOST:PORT, or --listen HOST:PORT for gRPC"),
    **dict.fromkeys(("--tensor-parallel-size", "-tp", "--tp", "--tp-size"), "--tensor-parallel N"),
    **dict.fromkeys(("--max-model-len", "--context-length", "--ctx-size", "-c"), "--max-context-tokens N"),
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers"), "--device cuda or --device cpu for the whole model"),
    **dict.fromkeys(
        ("--draft-model", "-md", "--model-draft", "--speculative-model", "--speculative-config",
         "--speculative-draft-model-path"),
        "--draft PATH_OR_HUB_ID",
    ),
    **dict.fromkeys(
        ("--num-speculative-tokens", "--draft-max", "--draft-n", "--speculative-num-steps"),
        "--set target.max_gamma=N and --set draft.max_gamma=N for the limit, or specdec generate --gamma N",
    ),
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static"),
                    "--gpu-memory-utilization-target SHARE and --gpu-memory-utilization-draft SHARE"),
    **dict.fromkeys(("--quantization", "-q"), "--dtype int8"),
    **dict.fromkeys(("--threads", "-t"), "--num-threads-target N and --num-threads-draft N"),
    **dict.fromkeys(("--data-parallel-size", "-dp", "--dp-size"), "--replicas-target N"),
    **dict.fromkeys(("--max-num-batched-tokens", "--batch-size", "-b"), "--set target.max_step_tokens=N"),
    **dict.fromkeys(
        ("--enable-lora", "--lora-modules", "--lora-paths", "--lora"),
        "--backend vllm --backend-url URL in front of a server with the adapter, and --adapter NAME to name it",
    ),
    "--enforce-eager": "--compile-backend eager",
    "--tokenizer-path": "--tokenizer PATH_OR_HUB_ID",
    "-d": "--detach",
    "--served-model-name": "--set gateway.served_model_name=NAME",
    "--allow-anonymous": "--set gateway.allow_anonymous=true",
    "--seed": "--seed with each request, as in specdec generate --seed N",
    "--timeline": "--otlp-endpoint URL: traces have the times of each round",
    "--lane": "--set target.unix_socket=off and --set draft.unix_socket=off",
}  # fmt: skip

_REQUEST_HINTS = {
    **dict.fromkeys(("--max-tokens", "--n-predict", "-n", "--predict"), "--max-new-tokens N"),
    **dict.fromkeys(("--temp",), "--temperature T"),
    **dict.fromkeys(("--prompt", "-p"), "the prompt without a flag: specdec generate PROMPT"),
    **dict.fromkeys(("--model", "-m"), "--adapter NAME, or specdec up --target PATH_OR_HUB_ID for another model"),
    **dict.fromkeys(("--host", "--port", "--url", "--base-url"), "--endpoint HOST:PORT"),
    **dict.fromkeys(("--num-speculative-tokens", "--draft-max"), "--gamma N"),
    "--system-prompt": "--system TEXT with specdec chat",
}

#: Flags of other programs that have no counterpart, with the reason.
_ABSENT = {
    **dict.fromkeys(("--max-num-seqs", "--parallel", "-np"), "a replica runs all its sessions in one batch"),
    **dict.fromkeys(("--enable-prefix-caching", "--cache-reuse"), "prefix caching is always on"),
    "--trust-remote-code": "code of a checkpoint is never run",
    "--api-keys": "keys are a matter of specdec up --http and python -m gateway",
    "--api-key": "this command sends no key",
}

#: Flags of vLLM, SGLang and llama.cpp, with what to write here, by command.
_HINTS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("up", "serve"), _SERVING_HINTS),
    **dict.fromkeys(("generate", "chat", "bench"), _REQUEST_HINTS),
}

#: Subcommands that were removed, with what replaces them. For one release they are refused with that.
_REMOVED_COMMANDS = {"timeline": "traces have the times of each round (specdec up --otlp-endpoint URL)"}


class CommandParser(argparse.ArgumentParser):
    """A parser whose usage errors are one line in the form of every other error, and name the subcommand's help."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        """Parse as the base class does, but refuse unknown words in the subcommand that got them."""
        self._given = list(args[0]) if args and args[0] is not None else sys.argv[1:]
        parsed, unknown = super().parse_known_args(*args, **kwargs)
        if unknown and self._subparsers is None:
            self.error(self._about_unknown(unknown))
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print a usage error and exit with code 2."""
        see = " See" if message.endswith("?") else "; see"
        as_json = wants_json(getattr(self, "_given", ()))
        print_error(InvalidRequest(f"{message}{see} {self.prog} --help"), as_json=as_json)
        raise SystemExit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ArgumentError for an unknown subcommand, with what to use instead, and otherwise as the base class."""
        if action is not getattr(self._subparsers, "_group_actions", [None])[0] or value in (action.choices or ()):
            super()._check_value(action, value)
            return
        if instead := _REMOVED_COMMANDS.get(value):
            raise argparse.ArgumentError(None, f"specdec {value} was removed: {instead}")
        import difflib  # not at the top: `specdec --help` is to be quick

        alike = difflib.get_close_matches(value, list(action.choices or ()), n=1)
        hint = f"; did you mean {alike[0]}?" if alike else ""
        raise argparse.ArgumentError(None, f"{value!r} is not a command of specdec{hint}")

    def _about_unknown(self, words: Sequence[str]) -> str:
        flag = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
        if not flag:
            return f"unrecognized arguments: {' '.join(words)}"
        if hint := _HINTS.get(self.prog.rpartition(" ")[2], {}).get(flag):
            return f"{flag} is not a flag of specdec: use {hint}"
        if reason := _ABSENT.get(flag):
            return f"{flag} is not a flag of specdec: {reason}"
        import difflib  # not at the top: `specdec --help` is to be quick

        known = [known for known in self._option_string_actions if known.startswith("--")]
        alike = difflib.get_close_matches(flag, known, n=1)
        return f"unrecognized argument {flag}" + (f": did you mean {alike[0]}?" if alike else "")


def wants_json(argv: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON, so that errors are JSON as well."""
    return "--json" in argv or "--json-lines" in argv


def print_error(error: SpecdecError, *, as_json: bool) -> None:
    """Print an error to stderr: one line with the reason at its end, or one JSON object."""
    if not as_json:
        print(error_line(error), file=sys.stderr)
        return
    import json

    message = " ".join(error.message.split())
    fields = {"error": message, "code": error.code, "reason": error.reason, "field": error.field}
    print(json.dumps(fields, ensure_ascii=False), file=sys.stderr)
