"""The engine catalogue for people and scripts: every engine that the parser accepts, and what each promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

    from kvtape.backends.reference.engines.catalogue import EngineEntry
    from kvtape.cli.output import Section
    from kvtape.planner.grammar import Option

__all__ = ["EngineHelp", "engine_bodies", "engine_section", "labels"]


class EngineHelp(TyperCommand):
    """A command whose help ends in the catalogue, read when the help is asked for: it cannot lag behind."""

    def format_epilog(self, ctx: Context, formatter: HelpFormatter) -> None:
        from kvtape.backends.reference.engines.engine import Contract
        from kvtape.backends.reference.engines.registry import engine_entries

        with formatter.section("Engines"):
            formatter.write_dl([(entry.name, _described(entry)) for entry in engine_entries()])
        with formatter.section("What an engine promises"):
            formatter.write_dl([(str(contract), contract.promise) for contract in Contract])
        super().format_epilog(ctx, formatter)


def engine_bodies() -> list[dict[str, Any]]:
    """The catalogue as JSON has it, in its own order."""
    from kvtape.backends.reference.engines.registry import engine_entries

    return [
        {
            "engine": entry.name,
            "aliases": dict(entry.aliases),
            "options": [
                {"key": key, "kind": option.kind.__name__, "default": option.default, "allowed": option.allowed}
                for key, option in entry.options.items()
            ],
            "contract": str(entry.contract),
            "promise": entry.contract.promise,
            "quadratic": entry.quadratic,
            "experimental": entry.experimental,
            "bench_only": entry.bench_only,
            "about": entry.about,
        }
        for entry in engine_entries()
    ]


def engine_section() -> Section:
    from kvtape.backends.reference.engines.registry import engine_entries
    from kvtape.cli.output import Section

    columns = ("engine", "promise", "options", "other names", "what it keeps")
    rows = [(e.name, _promise(e), _options(e) or "-", _aliases(e) or "-", e.about) for e in engine_entries()]
    return Section("KV engines: NAME[:key=value[,key=value]*]", columns, rows)


def labels(*, quadratic: bool, experimental: bool, bench_only: bool) -> str:
    """`O(n^2)`: each token costs the whole context again."""
    all_of_them = {"O(n^2)": quadratic, "experimental": experimental, "bench only": bench_only}
    return ", ".join(label for label, there in all_of_them.items() if there)


def _described(entry: EngineEntry) -> str:
    also = f" Also {_aliases(entry)}." if entry.aliases else ""
    options = f" Options: {_options(entry)}." if entry.options else ""
    return f"{_promise(entry)}: {entry.about}.{options}{also}"


def _promise(entry: EngineEntry) -> str:
    """Contract and labels, and where a window changes them, those too."""
    from kvtape.backends.reference.engines.registry import make_engine, parse_engine

    def said(contract: str, quadratic: bool) -> str:
        flags = labels(quadratic=quadratic, experimental=entry.experimental, bench_only=entry.bench_only)
        return ", ".join(part for part in (contract, flags) if part)

    bare = said(entry.contract, entry.quadratic)
    window = entry.options.get("window")
    if window is None or window.default is not None:
        return bare
    info = make_engine(parse_engine(f"{entry.name}:window=8")).info
    bounded = said(info.contract, info.quadratic)
    return bare if bounded == bare else f"{bare} (with window=N: {bounded})"


def _aliases(entry: EngineEntry) -> str:
    return ", ".join(
        alias if target == entry.name else f"{alias} = {target}" for alias, target in entry.aliases.items()
    )


def _options(entry: EngineEntry) -> str:
    return ", ".join(f"{key}={_value(option)}" for key, option in entry.options.items())


def _value(option: Option) -> str:
    """The words that are allowed, or the default and its bounds, or N."""
    if option.kind is str and option.allowed:
        return "|".join(str(word) for word in option.allowed)
    low, high = option.allowed or (None, None)
    bounds = f" ({low} to {high})" if option.kind is int and high is not None else ""
    return f"{'N' if option.default is None else option.default}{bounds}"
