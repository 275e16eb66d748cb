"""What makes a shell ask kvtape for completions, and where each shell looks for it.

Each script sets KVTAPE_COMPLETE to its shell and hands over the words behind `kvtape`, up to the cursor, as they are:
nothing is joined and cut again, and nothing of the answer is run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["SCRIPTS", "chosen_shell", "install"]

_BASH = """\
# kvtape: completion for bash 4.4 or newer
_kvtape() {
    mapfile -t COMPREPLY < <(KVTAPE_COMPLETE=bash kvtape "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -gt 0 ]] && compopt -o nospace
}
complete -o default -F _kvtape kvtape
"""

_ZSH = """\
#compdef kvtape
# kvtape: completion for zsh
_kvtape() {
    local line word about
    local -a whole open about_whole about_open
    while IFS= read -r line; do
        word=${line%%$'\\t'*} about=${line#*$'\\t'}
        if [[ $word == *[:=,/] ]]; then
            open+=("$word") about_open+=("$word${about:+  -- $about}")
        else
            whole+=("$word") about_whole+=("$word${about:+  -- $about}")
        fi
    done < <(KVTAPE_COMPLETE=zsh kvtape "${(@)words[2,$CURRENT]}" 2>/dev/null)
    (( ${#whole} )) && compadd -l -d about_whole -a whole
    (( ${#open} )) && compadd -S '' -l -d about_open -a open
    (( ${#whole} + ${#open} )) || _files
}
if [[ $funcstack[1] == _kvtape ]]; then _kvtape "$@"; else compdef _kvtape kvtape; fi
"""

_FISH = """\
# kvtape: completion for fish
function __kvtape_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l found (KVTAPE_COMPLETE=fish kvtape $words[2..-1] 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c kvtape -f -a '(__kvtape_complete)'
"""

SCRIPTS: Final[dict[str, str]] = {"bash": _BASH, "fish": _FISH, "zsh": _ZSH}


def chosen_shell(asked: str | None) -> str:
    """The shell that was asked for, else the one that kvtape was started from, else the login shell.

    Raises SpecError for a shell without a script, UsageError where none is found.
    """
    from kvtape.backends.errors import UsageError
    from kvtape.planner.grammar import choose_name

    if asked is not None:
        return choose_name("shell", asked, SCRIPTS)
    for name in (_parent_shell(), Path(os.environ.get("SHELL", "")).name):
        if name in SCRIPTS:
            return name
    raise UsageError(f"which shell this is cannot be told; name it with --shell, one of {', '.join(SCRIPTS)}")


def _parent_shell() -> str | None:
    from shellingham import detect_shell

    try:
        name: str = detect_shell()[0]
    except (OSError, RuntimeError):  # no shell among the parents, no list of processes, or not on this system
        return None
    return name


def install(shell: str, environment: Mapping[str, str]) -> tuple[Path, str]:
    """Write the script where `shell` looks by itself; that file, and what is still to do (empty: nothing).

    Raises OSError. What other programs own, such as .bashrc or .zshrc, is not touched.
    """
    from kvtape.cli.files import write_whole

    home = Path(environment.get("HOME") or Path.home())
    data = Path(environment.get("XDG_DATA_HOME") or home / ".local" / "share")
    settings = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    places = {
        # bash-completion loads from there when a command is first completed.
        "bash": data / "bash-completion" / "completions" / "kvtape",
        "fish": settings / "fish" / "completions" / "kvtape.fish",
        "zsh": data / "zsh" / "site-functions" / "_kvtape",
    }
    place = places[shell]
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, SCRIPTS[shell])
    return place, _left_to_do(shell, place)


def _left_to_do(shell: str, place: Path) -> str:
    name = os.fspath(place)
    if shell == "bash":
        return f"where bash-completion is not installed, add to ~/.bashrc: source {name}"
    if shell == "zsh":
        return f"add to ~/.zshrc, before compinit: fpath=({os.fspath(place.parent)} $fpath)"
    return ""
