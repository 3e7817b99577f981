"""Tests Hugging Face's Accelerate and Trainer, which use their own code paths for torch_xla.

The reference is the same training in eager torch on the CPU.
"""

import copy
import os
import sys

import fresh
import pytest
import torch
from tiers import exhaustive
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

STEPS, BATCH, LENGTH, VOCABULARY = 6, 8, 12, 64


@pytest.fixture(autouse=True)
def initial_state(monkeypatch):
    """Resets Accelerate's state of the process, and `xm.optimizer_step`, which Trainer replaces."""
    monkeypatch.setattr(xm, "optimizer_step", xm.optimizer_step)
    met.clear_all()
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


# Accelerate.


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def classes(rows: int) -> TensorDataset:
    return TensorDataset(torch.randn(rows, 16), torch.randint(4, (rows,)))


def parts(model: nn.Module):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)


def eager_losses(model, loader, *, accumulate=1, dtype=None):
    """The loss of each batch. Fewer than `accumulate` batches at the end are also a step."""
    optimizer, scheduler = parts(model)
    losses = []
    for i, (x, y) in enumerate(loader, 1):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            out = model(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if i % accumulate == 0 or i == len(loader):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("precision", "accumulate"), [exhaustive("no", 1), ("no", 4), ("bf16", 1)])
def test_the_loop_of_accelerates_documents(precision, accumulate):
    model, data = small_model(), classes(12 * BATCH - 3)
    loader = DataLoader(data, batch_size=BATCH)
    dtype = torch.bfloat16 if precision == "bf16" else None
    expected = eager_losses(copy.deepcopy(model), loader, accumulate=accumulate, dtype=dtype)

    accelerator = accelerate.Accelerator(
        mixed_precision=precision, gradient_accumulation_steps=accumulate
    )
    optimizer, scheduler = parts(model)
    used = []
    model[0].register_forward_hook(lambda module, args, out: used.append(out.dtype))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, compiles = [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        compiles.append(met.counter_value("UncachedCompile"))
    assert x.device == accelerator.device == torch.device("xla:0") and set(used) == {
        dtype or torch.float32
    }
    torch.testing.assert_close(
        torch.stack(losses).cpu(),
        torch.tensor(expected),
        atol=1e-5 if dtype is None else 2e-2,
        rtol=0,
    )
    # Two rounds of accumulation compile every program, except for the last batch, which is smaller.
    assert met.executed_fallback_ops() == [] and compiles[2 * accumulate] == compiles[-2]


def test_metrics_see_every_row_once():
    accelerator = accelerate.Accelerator()
    rows = 84  # more batches than the loader prefetches, and a smaller last one
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(rows)), batch_size=BATCH))
    seen, at_end = [], []
    for (x,) in loader:
        seen.append(accelerator.gather_for_metrics(x).cpu())
        at_end.append(accelerator.gradient_state.end_of_dataloader)
    assert torch.equal(torch.cat(seen), torch.arange(rows))
    assert at_end == [False] * (len(loader) - 1) + [True] and loader.dataset.tensors[0].shape == (
        rows,
    )


def test_a_state_is_saved_and_loaded(tmp_path):
    accelerator = accelerate.Accelerator()
    model = small_model()
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, *parts(model), DataLoader(classes(2 * BATCH), batch_size=BATCH)
    )

    def epoch():
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(nn.functional.dropout(model(x)), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()] + [
            torch.rand(2),
            torch.tensor(scheduler.get_last_lr()),
        ]

    epoch()
    accelerator.save_state(str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "scheduler.bin"]
    once = epoch()
    accelerator.load_state(str(tmp_path))
    for a, b in zip(once, epoch()):
        assert torch.equal(a, b)


def test_what_a_world_of_one_process_gathers():
    accelerator = accelerate.Accelerator()
    x = torch.arange(4.0, device=accelerator.device)
    for same in (
        accelerator.gather(x),
        accelerator.reduce(x, "mean"),
        accelerator.reduce(x, "sum"),
        accelerator.pad_across_processes(x),
    ):
        assert same.device.type == "xla" and torch.equal(same.cpu(), torch.arange(4.0))
    assert torch.equal(
        accelerate.utils.broadcast(x).cpu(), torch.arange(4.0)
    ) and accelerate.utils.broadcast_object_list([3]) == [3]
    assert accelerator.num_processes == 1 and accelerator.is_main_process
    accelerator.wait_for_everyone()
    accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()


def test_scaled_gradients():
    model = small_model()
    x, y = torch.randn(BATCH, 16), torch.randint(4, (BATCH,))
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.zero_grad()
    accelerator = accelerate.Accelerator(mixed_precision="fp16")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x, y = x.to("xla"), y.to("xla")
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    assert accelerator.clip_grad_norm_(model.parameters(), 0.1).item() == pytest.approx(
        expected.item(), rel=1e-2
    )
    optimizer.step()
    assert not optimizer.step_was_skipped
    before = [p.detach().cpu() for p in model.parameters()]
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(model(x * float("inf")), y))
    optimizer.step()
    assert optimizer.step_was_skipped and all(
        torch.equal(a, p.cpu()) for a, p in zip(before, model.parameters())
    )


# Trainer.


class Tokens(Dataset):
    """Rows of random tokens, which are also the labels."""

    def __init__(self, rows: int) -> None:
        self.x = torch.randint(
            VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1)
        )

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i]}


def llama():
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2():
    transformers.set_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=LENGTH
        )
    )


def trainer_losses(model, accumulate):
    """Losses of Trainer's defaults in eager torch.

    They are AdamW, a linear schedule and gradients clipped to norm 1.
    """
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    x = Tokens(STEPS * accumulate * BATCH).x.view(STEPS, accumulate, BATCH, LENGTH)
    losses, model = [], model.train()
    for group in x:
        loss = sum(model(input_ids=ids, labels=ids).loss / accumulate for ids in group)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Compiles(transformers.TrainerCallback):
    """Records the number of compiled programs after each step."""

    def __init__(self) -> None:
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(met.counter_value("UncachedCompile"))


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def make_trainer(model, folder, *, kind=transformers.Trainer, accumulate=1, **options):
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=accumulate,
        learning_rate=0.01,
        logging_steps=1,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
        **options,
    )
    rows = STEPS * accumulate * BATCH
    return kind(
        model,
        arguments,
        train_dataset=Tokens(rows),
        eval_dataset=Tokens(20),
        compute_metrics=accuracy,
        callbacks=[Compiles()],
    )


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.slow
def test_trainer_trains_evaluates_saves_and_predicts(tmp_path):
    model = llama()
    expected = copy.deepcopy(model)
    trainer = make_trainer(model, tmp_path, eval_strategy="steps", eval_steps=3, save_steps=3)
    trainer.train()
    assert next(model.parameters()).device.type == "xla" and met.executed_fallback_ops() == []
    torch.testing.assert_close(
        logged(trainer, "loss"), trainer_losses(expected, 1), atol=1e-5, rtol=0
    )
    seen = trainer.pop_callback(Compiles).seen
    assert seen[-1] == seen[-2]

    ids = Tokens(20).x
    with torch.no_grad():
        logits = expected.eval()(input_ids=ids).logits
    result = trainer.predict(Tokens(20))
    torch.testing.assert_close(torch.from_numpy(result.predictions), logits, atol=1e-4, rtol=0)
    assert result.metrics["test_accuracy"] == pytest.approx(
        (logits.argmax(-1) == ids).float().mean().item()
    )
    assert logged(trainer, "eval_loss")[-1] == pytest.approx(result.metrics["test_loss"])

    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    for a, b in zip(loaded.parameters(), model.parameters()):
        assert torch.equal(a, b.cpu())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_trainer_resumes_where_it_was(tmp_path):
    # GPT-2 has dropout and tied weights: the random state must be restored, and tied weights are
    # saved once.
    whole = make_trainer(gpt2(), tmp_path, save_steps=3)
    whole.train()
    resumed = make_trainer(gpt2(), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert logged(resumed, "loss") == logged(whole, "loss") and len(logged(whole, "loss")) == STEPS
    for a, b in zip(whole.model.parameters(), resumed.model.parameters()):
        assert torch.equal(a.cpu(), b.cpu())


class OptimizerBeforeSchedule(transformers.Trainer):
    """A Trainer that calls `create_optimizer`.

    Trainer 5.23 with FSDP on torch_xla omits the call, and therefore fails on any torch_xla.
    """

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.optimizer is None:
            self.optimizer = self.accelerator.prepare(self.create_optimizer())
        return super().create_scheduler(num_training_steps, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "frozen"), [exhaustive(1, False), exhaustive(2, False), (1, True)]
)
def test_trainer_with_fsdp(tmp_path, num_devices, accumulate, frozen):
    model = llama()
    if frozen:
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        model.model.layers[1].self_attn.requires_grad_(True)
    expected = trainer_losses(copy.deepcopy(model), accumulate)
    config = {
        "xla": True,
        "xla_fsdp_v2": True,
        "xla_fsdp_grad_ckpt": True,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    }
    trainer = make_trainer(
        model,
        tmp_path,
        kind=OptimizerBeforeSchedule,
        accumulate=accumulate,
        fsdp=True,
        fsdp_config=config,
        save_strategy="no",
    )
    trainer.train()
    torch.testing.assert_close(logged(trainer, "loss"), expected, atol=1e-5, rtol=0)
    seen = trainer.pop_callback(Compiles).seen
    assert met.executed_fallback_ops() == [] and len(set(seen[3:])) == 1

    unit = trainer.model.module.model.layers[0].module
    assert unit.mlp.gate_proj.weight.partition_spec == ("fsdp", None)
    for name, parameter in trainer.model.named_parameters():
        assert "fsdp" in parameter.partition_spec, name
        for value in (parameter, *trainer.optimizer.state.get(parameter, {}).values()):
            if value.dim():
                assert value.local_shards[0].data.numel() == value.numel() // num_devices, name
    assert set(map(id, trainer.optimizer.state)) == {
        id(p) for p in trainer.model.parameters() if p.requires_grad
    }

    predictions = trainer.predict(Tokens(20)).predictions
    assert predictions.shape == (20, LENGTH, VOCABULARY)


_PROGRAM = """
import torch
import torch_xla.runtime as xr

xr.use_spmd()
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loss = model(torch.ones(8, 4, device=accelerator.device)).square().mean()
accelerator.backward(loss)
optimizer.step()
accelerator.print(
    accelerator.distributed_type.value,
    accelerator.device,
    xr.global_runtime_device_count(),
    bool(loss.isfinite()),
)
"""


@pytest.mark.exhaustive
def test_a_program_of_its_own(num_devices):
    # Except on a TPU, Accelerate reads from LOCAL_RANK whether this process prints; its launcher
    # sets the variable.
    given = {
        "CPU_NUM_DEVICES": str(num_devices),
        "PJRT_DEVICE": "CPU",
        "LOCAL_RANK": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    result = fresh.run(["-c", _PROGRAM], {**os.environ, **given})
    assert result.stdout.split() == ["XLA", "xla:0", str(num_devices), "True"], result.stderr
