"""Serves a Llama or a GPT-2 over HTTP, by OpenAI's interface, split over a mesh.

    python -m examples.llama_serving.serve --model FOLDER
        a folder of Hugging Face's, on one device
    python -m examples.llama_serving.serve --model FOLDER --mesh tensor=8
        on eight accelerators; add --devices 8 to emulate them
    curl localhost:8000/v1/completions --json '{"prompt": "Once", "max_tokens": 16, "stream": true}'
        asks it

The printed address is also that of a page for browsers.
"""

from examples.llama_serving.config import checked, config_from
from examples.training.knobs import begin_command

if __name__ == "__main__":
    # Before the imports below, which take seconds.
    begin_command(lambda: checked(config_from(None, usage=__doc__)))

import spmd_core as spmd  # before transformers: see spmd_core.torch_backend.torchvision_ops

# isort: split
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from examples.llama_serving.app import Served, make_app
from examples.llama_serving.config import (
    DEFAULT_LENGTH,
    KEY_VARIABLE,
    ServeConfig,
    api_key,
    check_axes,
)
from examples.llama_serving.connections import Limits, possible_connections
from examples.llama_serving.engine import Engine
from examples.llama_serving.guard import Access, is_local
from examples.llama_serving.loading import (
    ModelConfig,
    ModelFolderError,
    end_tokens,
    load_model,
    read_config,
    read_tokenizer,
)
from examples.llama_serving.measures import Measures
from examples.llama_serving.programs import Programs
from examples.llama_serving.server import Ending, Server, address, listening_socket
from examples.llama_serving.text import PromptEncoder
from examples.training.collector import long_lived
from examples.training.command import exit_code, mesh_of
from examples.training.knobs import EXIT_INTERRUPTED, KnobError
from examples.training.mesh_sizes import check_heads

_DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}


def access_of(config: ServeConfig) -> Access:
    """Who may ask."""
    return Access(
        hosts=[*config.allow_host, config.host],
        origins=config.allow_origin,
        api_key=api_key(config) or None,
    )


def check_public(config: ServeConfig, access: Access, *, local: bool) -> None:
    """Checks that a server that others can reach has a key, or is meant to have none.

    Raises:
        KnobError: it has none.
    """
    if not local and access.api_key is None and not config.without_key:
        raise KnobError(
            f"--host {config.host} lets other machines ask, so clients must send an API key; got "
            f"none. Set the variable {KEY_VARIABLE}, or pass --without-key to let everyone ask."
        )


def parsed_mesh(text: str, config: ModelConfig, *, num_emulated: int = 0) -> spmd.Mesh | None:
    """The mesh, or None for one device.

    Raises:
        KnobError: it has another axis than `tensor`, or does not divide the model's heads.
        spmd.errors.MeshError: the text is not a mesh, or the mesh does not fit the devices.
    """
    if not text:
        return None
    mesh = mesh_of(text, spmd.global_runtime_device_count(), num_emulated=num_emulated)
    check_axes(text, mesh.shape())
    check_heads(mesh.size(), config.num_attention_heads, of="this model", other="another model")
    return mesh


def slot_length(max_length: int, config: ModelConfig) -> int:
    """The positions of a slot.

    Raises:
        KnobError: there are more than the model has.
    """
    positions = config.max_position_embeddings
    if max_length > positions:
        raise KnobError(
            f"--max-length must be at most the model's positions; got {max_length} for "
            f"{positions}. Pass at most {positions}."
        )
    if max_length == 1:
        raise KnobError(
            "--max-length has room for a prompt and its answer; got 1. Pass at least 2."
        )
    return max_length or min(DEFAULT_LENGTH, positions)


def serve(config: ServeConfig) -> bool:
    """Loads, compiles and serves until Ctrl-C or SIGTERM; whether it was Ctrl-C.

    Raises:
        KnobError, ModelFolderError, spmd.errors.MeshError: the options, the folder or the mesh
            cannot work; raised before the model is loaded.
    """
    ending = Ending()
    with ending.caught():
        _serve(config, ending)
    _say("ended")
    return ending.was_interrupted


def _serve(config: ServeConfig, ending: Ending) -> None:
    checked(config)
    folder, access = Path(config.model), access_of(config)

    # --- Checks, before anything that takes minutes -----------------------------------------------
    model_config = read_config(folder)
    length = slot_length(config.max_length, model_config)
    tokenizer = read_tokenizer(folder, model_config)
    if config.devices:
        spmd.simulate(config.devices)
    spmd.use_spmd()
    mesh = parsed_mesh(config.mesh, model_config, num_emulated=config.devices)
    try:
        listening = listening_socket(config.host, config.port)
    except OSError as error:
        raise KnobError(
            f"--host and --port name a free address of this machine; got {config.host} and "
            f"{config.port}: {error}. Pass another one, or --port 0 for any."
        ) from None

    with closing(listening):
        check_public(config, access, local=is_local(listening))
        connections = possible_connections(config.connections)
        if connections < config.connections:
            _say(
                f"at most {connections} connections, as this process may open no more files; got "
                f"--connections {config.connections}. Raise ulimit -n."
            )

        # --- Model and programs -------------------------------------------------------------------
        start = time.perf_counter()
        _say(f"loading {folder}")
        model = load_model(folder, model_config, dtype=_DTYPES[config.dtype], mesh=mesh)
        if config.scan:
            spmd.scan_model(model)
        programs = Programs(
            model, num_slots=config.slots, length=length, mesh=mesh, capture=config.capture
        )
        for program in programs.compile_all():
            _say(f"compiling: {program}")
        _say(f"ready after {time.perf_counter() - start:.0f} s")

        # --- Engine and server --------------------------------------------------------------------
        measures = Measures()
        engine = Engine(
            programs,
            tokenizer,
            end_tokens=end_tokens(model),
            max_queued=config.queue,
            measures=measures,
        )
        name = config.name or folder.resolve().name
        encoder = PromptEncoder(tokenizer)
        served = Served(engine, encoder, measures, name, model_config.vocab_size, access)
        limits = Limits(connections=connections)
        server = Server(make_app(served), engine, grace_s=config.grace_s, limits=limits)
        ending.ends(server)
        engine.start()
        _say(f"serving {name} at {address(listening)}; Ctrl-C ends it")
        try:
            with long_lived():
                server.run(sockets=[listening])
        finally:
            engine.stop(grace_s=0)


def _say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code (see `exit_code`)."""
    return exit_code(
        lambda: EXIT_INTERRUPTED if serve(config_from(argv, usage=__doc__)) else 0,
        usage=(ModelFolderError, spmd.errors.DataError, spmd.errors.CheckpointError),
    )


if __name__ == "__main__":
    sys.exit(main())
