"""GPT-2 over a mesh of devices in one flat file, without imports from other recipes: copy it.

    python examples/minimal.py                                     one device
    python examples/minimal.py --emulate 8 --fsdp 4 --tensor 2     eight emulated CPU devices
    python examples/minimal.py --fsdp 8 --bf16 --layers 12 --width 768 --heads 12 --seq 1024
    python examples/minimal.py --device cpu                        eager torch: the same losses

Legend: B sequences of a batch, T tokens of a sequence, D width, F 3·D or 4·D, V vocabulary.
"""

# ruff: noqa: E402 -- the options are read before the imports below, which take seconds
import argparse

raw = argparse.RawDescriptionHelpFormatter
options = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
options.add_argument("--device", choices=("xla", "cpu"), default="xla", help="cpu: eager torch")
options.add_argument("--emulate", type=int, default=0, help="CPU devices; 0: the real ones")
options.add_argument("--fsdp", type=int, default=1, help="devices that split batch and parameters")
options.add_argument("--tensor", type=int, default=1, help="devices that split heads and features")
options.add_argument("--data", default=argparse.__file__, help="a text; each byte is a token")
options.add_argument("--layers", type=int, default=2, help="blocks of the model")
options.add_argument("--width", type=int, default=64, help="size of the hidden state")
options.add_argument("--heads", type=int, default=4, help="attention heads of a block")
options.add_argument("--seq", type=int, default=64, help="tokens of a sequence")
options.add_argument("--batch", type=int, default=16, help="sequences of a step, on all devices")
options.add_argument("--steps", type=int, default=20, help="steps in all, also of a resumed run")
options.add_argument("--lr", type=float, default=3e-3, help="the peak of the learning rate")
options.add_argument("--bf16", action="store_true", help="matrix products in bfloat16")
options.add_argument("--checkpoint", default="", help="file to save to, and to go on from")
options.add_argument("--save-every", type=int, default=100, help="steps between two saves")
args = options.parse_args()
counts = ("fsdp", "tensor", "layers", "width", "heads", "seq", "batch", "steps", "save_every")
for rule, holds in (
    ("--emulate must be at least 0", args.emulate >= 0),
    (f"{', '.join(counts)} must be at least 1", min(getattr(args, name) for name in counts) >= 1),
    ("--lr must be a number above 0", 0 < args.lr < 1e9),
    ("--heads must divide --width", args.width % (args.heads or 1) == 0),
    ("--fsdp must divide --batch", args.batch % (args.fsdp or 1) == 0),
):
    if not holds:
        options.error(f"{rule}; got {vars(args)}. Change it.")

import spmd_core as spmd  # before transformers, whose import of torchvision it prepares

# isort: split
import math
import re
from itertools import chain, islice, repeat
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from spmd_core import metrics
from spmd_data import MpDeviceLoader, sharded_dataloader

# --- Mesh: devices with named axes; eager torch has none ------------------------------------------
device, mesh, input_sharding = torch.device("cpu"), None, None
if args.device == "xla":
    if args.emulate:
        spmd.simulate(args.emulate)
    spmd.use_spmd()
    device = spmd.device()
    sizes = (args.fsdp, args.tensor)
    mesh = spmd.Mesh(range(math.prod(sizes)), sizes, ("fsdp", "tensor"))
    input_sharding = spmd.ShardingSpec(mesh, ("fsdp", None), minibatch=True)

# --- Data: blocks of T tokens, each with the tokens that follow, in an order by the seed ----------
tokens = torch.tensor(list(Path(args.data).read_bytes()))
x_NT, y_NT = (part[: len(part) // args.seq * args.seq] for part in (tokens[:-1], tokens[1:]))
dataset = TensorDataset(x_NT.view(-1, args.seq), y_NT.view(-1, args.seq))
loader = sharded_dataloader(dataset, mesh, "fsdp" if mesh else None, batch_size=args.batch, seed=0)
batches = MpDeviceLoader(loader, device, input_sharding=input_sharding)

# --- Model: single-device code, in float32 --------------------------------------------------------
# transformers' own "sdpa" reads a tensor on the host to build its mask, which splits each step.
AttentionInterface.register("causal", sdpa_attention_forward)
config = GPT2Config(
    vocab_size=256, bos_token_id=0, eos_token_id=0, use_cache=False, attn_implementation="causal"
)
config.n_layer, config.n_embd, config.n_head = args.layers, args.width, args.heads
config.n_positions = args.seq
config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = 0.0
torch.manual_seed(0)
model = GPT2LMHeadModel(config).to(device).train()
num_params = sum(p.numel() for p in model.parameters())

# --- Marks: all that many devices need; gradients and optimizer state follow their parameter -----
RULES: dict[str, tuple] = {
    r"wte\.weight": (("tensor", "fsdp"), None),  # (V, D), which are also the logits' weights
    r"wpe\.weight": ("fsdp", None),  # (T, D)
    r"(c_attn|c_fc)\.weight": ("fsdp", "tensor"),  # (D, F), split by heads and features
    r"(c_attn|c_fc)\.bias": ("tensor",),  # (F,)
    r"c_proj\.weight": (("tensor", "fsdp"), None),  # (F or D, D), whose products end in a sum
    r"c_proj\.bias|ln_": (),  # replicated
}


def mark_hidden_state(module: nn.Module, inputs: tuple, hidden_BTD: torch.Tensor) -> None:
    """Keeps the batch split over fsdp, so that XLA gathers each block's weights for it."""
    assert mesh is not None
    spmd.mark_sharding(hidden_BTD, mesh, ("fsdp", None, None))


if mesh:
    for name, parameter in model.named_parameters():
        (spec,) = (spec for pattern, spec in RULES.items() if re.search(pattern, name))
        spmd.mark_sharding(parameter, mesh, spec)
    for module in (model.transformer.drop, *model.transformer.h, model.transformer.ln_f):
        module.register_forward_hook(mark_hidden_state)

# --- Optimizer, and the saved run that this one goes on from --------------------------------------
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda s: min((s + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * s / args.steps))
)
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}
first = 0
if args.checkpoint and Path(args.checkpoint).exists():
    saved = torch.load(args.checkpoint, weights_only=True)
    first = saved["step"]
    for name, part in parts.items():
        part.load_state_dict(saved[name])

# --- Loop: each batch is one step, and one program on all devices ---------------------------------
autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.bf16)
times, unread = metrics.StepTimes(), []  # the losses, on the device
epochs = chain.from_iterable(repeat(batches))
for step, (x_BT, y_BT) in enumerate(islice(epochs, args.steps - first), start=first + 1):
    with autocast:
        logits_BTV = model(x_BT).logits
    loss = F.cross_entropy(logits_BTV.float().flatten(0, 1), y_BT.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    unread.append(loss.detach())
    if step % 5 == 0 and len(unread) > 1:
        # The loss of the step before, which runs while Python records this one: nothing waits.
        print(f"step {step - 1:5d}  loss {unread[-2].item():.4f}", flush=True)
        times.mark(step=step - 1, in_flight=1)
    if args.checkpoint and (step % args.save_every == 0 or step == args.steps):
        state = {name: part.state_dict() for name, part in parts.items()}
        spmd.save({"step": step, **state}, args.checkpoint)  # unsharded tensors, for any mesh
batches.close()
losses = [loss.item() for loss in unread]

# --- Metrics --------------------------------------------------------------------------------------
if times.median_s:
    tokens_per_s = args.batch * args.seq / times.median_s
    print(f"{num_params:,} parameters, {tokens_per_s:,.0f} tokens/s; a step takes {times}")
if mesh and losses:
    print(metrics.memory_use())
    for moved in metrics.traffic():
        axes = ", ".join(moved.axes)
        print(f"{moved.number} {moved.kind} over {axes}: {moved.moved_bytes:,.0f} bytes a device")
