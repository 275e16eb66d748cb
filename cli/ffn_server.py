"""`kvtape ffn-server`: feed-forward layers of a model for engines that compute the rest elsewhere."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvtape.cli.args import AnyModelPath, AsJson

__all__ = ["ffn_server"]


def ffn_server(
    model: AnyModelPath = None,
    host: Annotated[str, typer.Option("--host", metavar="H", help="A loopback address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8077,
    packed: Annotated[bool, typer.Option("--packed", help="Keep weights quantised; slower, and far smaller.")] = False,
    as_json: AsJson = False,
) -> int:
    """Serve feed-forward layers, and sessions of KV engines, over HTTP.

    Says on stdout where it listens once it does, and runs until interrupted. It asks for no secret, so it listens on
    loopback addresses alone.

    \b
    Example:
      kvtape ffn-server --model M.gguf --port 8077
    """
    from kvtape.backends.reference.model.weights import Weights
    from kvtape.backends.reference.remote.server import FfnServer
    from kvtape.cli.models import demo_model
    from kvtape.cli.output import Section, emit

    weights = Weights(model if model is not None else demo_model(), packed=packed)
    with FfnServer(weights, host, port) as server:
        info = server.info()
        layers = f"{info['n_layer']} layers of {info['arch']}, rows of {info['n_embd']}"
        body = {**info, "url": server.url, "packed": packed}
        emit("ffn-server", body, [Section(None, (), [[f"listening on {server.url}: {layers}"]])], as_json=as_json)
        sys.stdout.flush()
        server.serve_forever()
    return 0
