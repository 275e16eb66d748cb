"""`kvtape capacity`: the context that memory holds, exactly as the engine will allocate it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AsJson, PlotPath

if TYPE_CHECKING:
    from kvtape.capacity.answer import Answer
    from kvtape.capacity.layers import ModelKV
    from kvtape.capacity.resolve import MemoryBudget
    from kvtape.cli.output import Section

__all__ = ["capacity"]

_SIZE = "SIZE"


def capacity(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL]", help="A GGUF, or the folder of an OpenVINO model.", show_default=False),
    ] = None,
    metadata: Annotated[
        Path | None, typer.Option("--metadata", metavar="F", help="In place of MODEL: a JSON map of GGUF keys.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE|auto", help="Free memory; auto: what this machine has.")
    ] = None,
    ctx: Annotated[int | None, typer.Option("--ctx", metavar="N", min=1, help="Context asked for, tokens.")] = None,
    slots: Annotated[int, typer.Option("--slots", metavar="N", min=1, help="Sequences at once.")] = 1,
    unified: Annotated[
        bool, typer.Option("--unified/--separate", help="Slots share one cache, or have one each.")
    ] = False,
    ubatch: Annotated[int, typer.Option("--ubatch", metavar="N", min=1, help="Tokens of one graph.")] = 512,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Tokens of one call.")] = 2048,
    kv_type: Annotated[
        str | None,
        typer.Option("--kv-type", metavar="T", help="Storage of keys and values; default f16 (openvino: u8)."),
    ] = None,
    kv_type_k: Annotated[str | None, typer.Option("--kv-type-k", metavar="T", help="Storage of keys alone.")] = None,
    kv_type_v: Annotated[str | None, typer.Option("--kv-type-v", metavar="T", help="Storage of values alone.")] = None,
    flash_attn: Annotated[
        bool, typer.Option("--flash-attn/--no-flash-attn", help="Without it values may be padded.")
    ] = True,
    swa_full: Annotated[bool, typer.Option("--swa-full", help="Windowed layers keep the whole context.")] = False,
    snapshots: Annotated[
        int, typer.Option("--snapshots", metavar="N", min=0, help="Rollback copies of each recurrent state.")
    ] = 0,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="SPEC",
            help="llama.cpp[@bBUILD], openvino or openvino-cb; default: what runs the model.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar=_SIZE, help="Weights in this memory; default: the model's tensors."),
    ] = None,
    overhead: Annotated[str, typer.Option("--overhead", metavar=_SIZE, help="Compute buffers and the like.")] = "0",
    reserve: Annotated[str, typer.Option("--reserve", metavar=_SIZE, help="To leave free on the device.")] = "0",
    limit: Annotated[
        str | None, typer.Option("--limit", metavar=_SIZE, help="Your own limit, whatever the device has.")
    ] = None,
    reserved: Annotated[str, typer.Option("--reserved", metavar=_SIZE, help="Of that limit, already taken.")] = "0",
    headroom: Annotated[
        float, typer.Option("--headroom", metavar="F", help="Part that stays unused; outside (0, 1) it is 0.1.")
    ] = 0.1,
    hot: Annotated[
        int | None, typer.Option("--hot", metavar="N", min=1, help="A policy's budget in the cache, tokens.")
    ] = None,
    cold: Annotated[str, typer.Option("--cold", metavar=_SIZE, help="Budget of the cold store on the host.")] = "0",
    plot: PlotPath = None,
    as_json: AsJson = False,
) -> int:
    """Say which context fits a memory, and what the engine allocates for it.

    A SIZE is bytes, or a number with KiB, MiB, GiB (1024) or kB, MB, GB (1000). Without --memory nothing is clamped:
    the sizes of --ctx, or of the model's trained context. Where nothing fits, it says what would do, with exit code 1.

    \b
    Examples:
      kvtape capacity model.gguf --memory 6GiB --kv-type q8_0
      kvtape capacity --metadata keys.json --ctx 32768 --slots 4 \\
        --unified --engine llama.cpp@b6000 --json
    """
    from kvtape.capacity.allocation import CacheSettings
    from kvtape.capacity.answer import Question, answer
    from kvtape.capacity.engines import engine_rule
    from kvtape.capacity.sizes import parse_size
    from kvtape.cli.output import emit
    from kvtape.cli.plots.writing import check_plot, write_picture

    check_plot(plot)
    # A folder holds an OpenVINO model; a GGUF is taken for llama.cpp's, which runs more of them.
    engine = engine or ("openvino" if model is not None and model.is_dir() else "llama.cpp")
    default_type = "u8" if engine_rule(engine).name.startswith("openvino") else "f16"
    settings = CacheSettings(slots, unified, batch, ubatch, flash_attn, swa_full, snapshots)
    subject = _subject(model, metadata)
    question = Question(
        model=subject,
        engine=engine,
        settings=settings,
        type_k=kv_type_k or kv_type or default_type,
        type_v=kv_type_v or kv_type or default_type,
        memory=_memory(
            memory,
            subject.weights_bytes if weights is None else parse_size(weights),
            overhead=parse_size(overhead),
            reserve=parse_size(reserve),
            limit=None if limit is None else parse_size(limit),
            reserved=parse_size(reserved),
            headroom=headroom,
        ),
        request=ctx,
        hot_limit=hot,
        cold_bytes=parse_size(cold),
    )
    found = answer(question)
    if plot is not None:
        from kvtape.cli.plots.capacity import capacity_picture

        write_picture(plot, capacity_picture(found))
    name = (model or metadata or Path()).name
    emit("capacity", {"model": name, **found.body()}, _sections(name, found), as_json=as_json)
    return int(found.least_memory_bytes is not None)


def _subject(model: Path | None, metadata: Path | None) -> ModelKV:
    from kvtape.capacity.errors import CapacityError
    from kvtape.capacity.source import read_metadata_kv, read_model_kv

    if (model is None) == (metadata is None):
        raise CapacityError("give one of MODEL and --metadata")
    if model is not None:
        return read_model_kv(model)
    return read_metadata_kv(metadata or "")


def _memory(
    text: str | None,
    weights: int,
    *,
    overhead: int,
    reserve: int,
    limit: int | None,
    reserved: int,
    headroom: float,
) -> MemoryBudget | None:
    from kvtape.capacity.errors import CapacityError
    from kvtape.capacity.machine import free_memory
    from kvtape.capacity.resolve import MemoryBudget
    from kvtape.capacity.sizes import parse_size

    if text is None:
        if limit is not None or reserve:
            raise CapacityError("--limit and --reserve are parts of a memory; give its size with --memory")
        return None
    free = free_memory() if text == "auto" else parse_size(text)
    return MemoryBudget(free, reserve, limit, reserved, weights, overhead, headroom)


def _sections(name: str, found: Answer) -> list[Section]:
    from kvtape.capacity.sizes import size_text
    from kvtape.cli.output import Section

    body = found.body()
    if found.least_memory_bytes is not None:  # a table of zeros would say less
        lines = [*([f"clamped: {body['clamp_reason']}"] if body["clamp_reason"] else []), *body["assumptions"]]
        return [Section(f"context of {name}: none", (), [(line,) for line in lines])]
    numbers: list[tuple[str, Any]] = [
        ("the model was trained for", body["model_max"] or None),
        ("asked for", body["request"]),
        ("memory holds", body["memory_tokens"]),
        ("served", body["effective"]),
        ("hot in the cache", body["hot"]),
        ("within reach of the planner", body["planner"]),
    ]
    sizes = [
        (
            what,
            None if body[key] is None else size_text(body[key]),
        )
        for what, key in (
            ("ideal", "ideal_bytes"),
            ("allocated", "allocated_bytes"),
            ("room needed", "peak_bytes"),
            ("memory for the cache", "cache_budget_bytes"),
            ("each token more", "marginal_bytes"),
        )
    ]
    caches = [
        (p["part"], p["layers"], p["cells"], p["streams"], *(f"{p[k]:.2f}" for k in ("k_mib", "v_mib", "total_mib")))
        for p in body["caches"]
    ]
    remarks = [*([f"clamped: {body['clamp_reason']}"] if body["clamp_reason"] else []), f"rule: {body['rule']}"]
    return [
        Section(f"context of {name}", ("tokens", "number"), numbers),
        Section("caches", ("part", "layers", "cells", "streams", "K MiB", "V MiB", "total MiB"), caches),
        Section("bytes", ("what", "size"), sizes),
        Section(None, (), [(line,) for line in (*remarks, *body["assumptions"])]),
    ]
