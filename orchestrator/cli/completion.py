"""`polyfleet completion bash|zsh|fish`, and the responses to these scripts when a shell completes an argument.

The scripts are our own because Typer's pass on words that bash has split at `:`, cannot complete `--to=nvi`, and let
zsh evaluate proposed values, which include names of other users' jobs. They query Typer with its protocol for fish: the
request is the line typed so far; each line of the response is VALUE, or VALUE, a tab and help.
"""

import os
from contextlib import suppress
from enum import StrEnum
from importlib import import_module
from typing import Annotated

import typer

from orchestrator.cli.terminal.output import write

VARIABLE = "_POLYFLEET_COMPLETE"

REQUEST = (
    '_TYPER_COMPLETE_ARGS="{line}" _TYPER_COMPLETE_FISH_ACTION=get-args'
    " _POLYFLEET_COMPLETE=complete_fish polyfleet 2>/dev/null"
)

BASH = f"""
# $2 is the part of the token that bash replaces, after the last of $COMP_WORDBREAKS, which include `:` and `=`.
_polyfleet_completion() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" option="" token prefix value
    token="${{line##*[[:space:]]}}"
    [[ $token == -*=* ]] && option="${{token%%=*}}="
    prefix="${{token%"$2"}}"
    COMPREPLY=()
    while IFS= read -r value; do
        [[ -n $value ]] || continue
        value="$option${{value%%$'\\t'*}}"
        COMPREPLY+=("${{value#"$prefix"}}")
    done < <(env {REQUEST.format(line="$line")})
    [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *: ]] && compopt -o nospace
    return 0
}}

complete -o default -F _polyfleet_completion polyfleet
"""

ZSH = f"""
#compdef polyfleet

_polyfleet_completion() {{
  local -a values labels open
  local value help option=""
  [[ $PREFIX == -*=* ]] && option="${{PREFIX%%=*}}="
  while IFS=$'\\t' read -r value help; do
    [[ -n $value ]] || continue
    if [[ $value == *: ]]; then open+=("$option$value"); continue; fi
    values+=("$option$value")
    labels+=("$value${{help:+  -- $help}}")
  done < <(env {REQUEST.format(line="${words[1,CURRENT-1]} $PREFIX")})
  (( $#values + $#open )) || {{ _files; return }}
  compadd -S "" -a open
  compadd -l -d labels -a values
}}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _polyfleet_completion "$@"
else
  compdef _polyfleet_completion polyfleet
fi
"""

FISH = f"""
function __polyfleet_completion
    set -l line (commandline -cp)
    set -l token (commandline -ct)
    set -l option (string match -r -- '^-[^=]*=' $token)
    set -l values (env {REQUEST.format(line="$line")} | string match -r '.+')
    if test (count $values) -gt 0
        string replace -r '^' -- "$option" $values
    else
        __fish_complete_path $token
    end
end

complete --command polyfleet --no-files --arguments "(__polyfleet_completion)"
"""


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


SCRIPTS = {Shell.BASH: BASH, Shell.ZSH: ZSH, Shell.FISH: FISH}


def completion(shell: Annotated[Shell, typer.Argument(help="Shell: bash, zsh or fish")]) -> None:
    """Print the completion script: `eval "$(polyfleet completion bash)"`.

    It completes commands, options and kinds of the catalogue; if a fleet is running, also its pools, nodes, kinds and
    jobs.
    """
    write(SCRIPTS[shell].strip())


def complete_shell(app: typer.Typer) -> bool:
    """Handle a shell's completion request, if this is one; return whether it was. Errors are suppressed, because the
    user is typing.
    """
    if VARIABLE not in os.environ:
        return False
    import_module("typer.completion").completion_init()  # Typer calls it only with its own `--install-completion`
    with suppress(Exception, SystemExit):
        app(prog_name="polyfleet")
    return True
