"""Completion scripts for bash, zsh and fish, generated from the parsers. Text in, text out."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Option(NamedTuple):
    flags: tuple[str, ...]  # ("-v", "--verbose")
    help: str
    takes: str  # "", "DEVICE", "FILE", or another metavar: what follows the flag


class Words(NamedTuple):
    """What can follow one command."""

    summary: str
    options: tuple[Option, ...]
    positional: tuple[str, ...]  # words for the arguments without a flag
    files: bool  # may one of those be a file?


def words_of(parser: argparse.ArgumentParser, summary: str, devices: Sequence[str], codes: Sequence[str]) -> Words:
    """Read a parser. An argument called DEVICE takes a device's name, FILE a file, CODE a diagnosis."""
    options, positional, files = [], [], False
    for action in parser._actions:
        metavar = str(action.metavar or "")
        if action.option_strings:
            takes = "" if action.nargs == 0 else metavar or "VALUE"
            options.append(Option(tuple(action.option_strings), action.help or "", takes))
        elif action.choices is not None:
            positional += [str(choice) for choice in action.choices]
        elif metavar == "DEVICE":
            positional += [name for name in devices if name != "all" or action.default == "all"]
        elif metavar == "CODE":
            positional += codes
        elif metavar == "FILE":
            files = True
    return Words(summary, tuple(options), tuple(positional), files)


def bash(commands: Mapping[str, Words], devices: Sequence[str]) -> str:
    cases = "\n".join(
        f"    {name})\n"
        f'      flags="{" ".join(flag for option in words.options for flag in option.flags)}"\n'
        f'      words="{" ".join(words.positional)}"\n'
        f"      files={1 if words.files else 0}\n"
        "      ;;"
        for name, words in commands.items()
    )
    takes_device = sorted({f for w in commands.values() for o in w.options if o.takes == "DEVICE" for f in o.flags})
    takes_file = sorted({f for w in commands.values() for o in w.options if o.takes == "FILE" for f in o.flags})
    return f"""\
# bash completion for anytorch; load it with: eval "$(anytorch completion bash)"
_anytorch() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  local command="" flags="" words="" files=0 word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    if [[ "$word" != -* ]]; then command="$word"; break; fi
  done
  COMPREPLY=()
  case "$previous" in
    {"|".join(takes_device) or "--none"})
      COMPREPLY=($(compgen -W "{" ".join(devices)}" -- "$current")); return ;;
    {"|".join(takes_file) or "--none"})
      COMPREPLY=($(compgen -f -- "$current")); return ;;
  esac
  case "$command" in
{cases}
    *)
      flags="--json --verbose -v --help --version"
      words="{" ".join(commands)}"
      ;;
  esac
  if [[ "$current" == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$current"))
  else
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ "$files" == 1 ]]; then COMPREPLY+=($(compgen -f -- "$current")); fi
  fi
}}
complete -F _anytorch anytorch
"""


def zsh(commands: Mapping[str, Words], devices: Sequence[str]) -> str:
    listed = "\n".join(f"    {quoted(f'{name}:{words.summary}')}" for name, words in commands.items())
    cases = "\n".join(
        f"    {name})\n      _arguments -s \\\n{_zsh_arguments(words, devices)}\n      ;;"
        for name, words in commands.items()
    )
    return f"""\
#compdef anytorch
# zsh completion for anytorch; put it on $fpath as _anytorch, or load it with: source <(anytorch completion zsh)
_anytorch() {{
  local -a commands
  local command="" position=2
  commands=(
{listed}
  )
  while (( position < CURRENT )); do
    if [[ "${{words[position]}}" != -* ]]; then command="${{words[position]}}"; break; fi
    (( position++ ))
  done
  if [[ -z "$command" ]]; then
    if [[ "${{words[CURRENT]}}" == -* ]]; then
      compadd -- --json --verbose -v --help --version
    else
      _describe 'command' commands
    fi
    return
  fi
  shift $(( position - 1 )) words
  (( CURRENT -= position - 1 ))
  case "$command" in
{cases}
  esac
}}
if [[ "${{funcstack[1]}}" == _anytorch ]]; then _anytorch "$@"; else compdef _anytorch anytorch; fi
"""


def _zsh_arguments(words: Words, devices: Sequence[str]) -> str:
    lines = []
    for option in words.options:
        value = {"": "", "DEVICE": f":device:({' '.join(devices)})", "FILE": ":file:_files"}.get(option.takes)
        value = f":{option.takes.lower()}: " if value is None else value
        told = option.help.replace("[", "(").replace("]", ")").replace(":", " ")
        lines += [f"        {quoted(f'{flag}[{told}]{value}')}" for flag in option.flags]
    if words.positional:
        lines.append(f"        {quoted('1:argument:(' + ' '.join(words.positional) + ')')}")
    if words.files:
        lines.append(f"        {quoted('2:file:_files')}")
    return " \\\n".join(lines)


def fish(commands: Mapping[str, Words], devices: Sequence[str]) -> str:
    names = " ".join(commands)
    lines = [
        "# fish completion for anytorch; save it as ~/.config/fish/completions/anytorch.fish",
        "complete -c anytorch -f",
        f"set -l commands {names}",
    ]
    for flag, told in (
        ("json", "one JSON document"),
        ("verbose", "log each step"),
        ("help", "help"),
        ("version", "version"),
    ):
        lines.append(f'complete -c anytorch -n "not __fish_seen_subcommand_from $commands" -l {flag} -d {quoted(told)}')
    for name, words in commands.items():
        lines.append(
            f'complete -c anytorch -n "not __fish_seen_subcommand_from $commands" -a {name} -d {quoted(words.summary)}'
        )
        here = f'complete -c anytorch -n "__fish_seen_subcommand_from {name}"'
        for option in words.options:
            flags = " ".join(f"-l {f[2:]}" if f.startswith("--") else f"-s {f[1:]}" for f in option.flags)
            value = {"": "", "DEVICE": f" -x -a {quoted(' '.join(devices))}", "FILE": " -r -F"}.get(option.takes, " -x")
            lines.append(f"{here} {flags}{value} -d {quoted(option.help)}")
        if words.positional:
            lines.append(f"{here} -a {quoted(' '.join(words.positional))}")
        if words.files:
            lines.append(f"{here} -F")
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """The text in single quotes, escaped for bash, zsh and fish."""
    return "'" + text.replace("\\", "").replace("'", "’") + "'"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
