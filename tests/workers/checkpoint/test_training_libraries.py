"""Checkpoints that training libraries really saved: imported, exported, and resumed from by the library itself. The
losses that follow are those of a run that was never interrupted, bit for bit.

Polyfleet needs none of these libraries: a test is skipped where its library is not installed. Which versions were
tried is in docs/guides/checkpoints.md.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from workers.checkpoint import export_checkpoint
from workers.checkpoint.exchange.completeness import check
from workers.checkpoint.exchange.importer import import_here

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
RANKS = Path(__file__).with_name("library_ranks.py")


def network():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


def returned(source, to):
    """What the import of `source` said, and the same checkpoint exported again under the name it had."""
    told = import_here(str(source), str(to / "imported"))
    target = to / "exported" / Path(source).name
    export_checkpoint(told["path"], target, format=told["format"])
    return told, target


def left_out(told):
    return {part["name"] for part in told["left_out"]}


# -- Accelerate


class Seen:
    """What a script registers for checkpointing."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step, "history": [(1, 2.5), None]}

    def load_state_dict(self, state):
        self.step = state["step"]


class WithAccelerate:
    """Models that are trained side by side, each with an optimizer and a scheduler, on data in a shuffled order."""

    def __init__(self, models=1, **arguments):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
        from accelerate.utils import DataLoaderConfiguration, set_seed

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        set_seed(1)
        data = DataLoaderConfiguration(use_seedable_sampler=True)
        self.accelerator = Accelerator(cpu=True, dataloader_config=data, **arguments)
        prepare = self.accelerator.prepare
        self.models = [prepare(network()) for _ in range(models)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in self.models]
        self.optimizers = [prepare(optimizer) for optimizer in optimizers]
        self.schedulers = [prepare(torch.optim.lr_scheduler.CosineAnnealingLR(o, 20)) for o in optimizers]
        rows = TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
        # A generator of its own: an iterator draws from torch's default one when it starts.
        self.data = prepare(DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)))
        self.seen = Seen()
        self.accelerator.register_for_checkpointing(self.seen)

    def train(self, count):
        rest = self.accelerator.skip_first_batches(self.data, self.seen.step)
        return [self._step(inputs, targets) for inputs, targets in itertools.islice(rest, count)]

    def _step(self, inputs, targets):
        losses = []
        for model, optimizer, scheduler in zip(self.models, self.optimizers, self.schedulers, strict=True):
            with self.accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                self.accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        self.seen.step += 1
        return losses


@pytest.mark.parametrize(("models", "safe"), [(1, True), (1, False), (2, True), (2, False)])
def test_accelerate_continues_from_its_own_folder(models, safe, tmp_path):
    pytest.importorskip("accelerate")
    expected = WithAccelerate(models).train(6)
    run = WithAccelerate(models)
    assert run.train(3) == expected[:3]
    run.accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    assert check(tmp_path / "state") == ("whole", "accelerate", "")
    told, back = returned(tmp_path / "state", tmp_path)
    assert (told["format"], told["step"], told["left_out"]) == ("accelerate", 3, [])
    assert sum(kind == "module" for kind in told["entries"].values()) == models
    assert sum(kind == "optimizer" for kind in told["entries"].values()) == models
    assert {p.name for p in back.iterdir()} == {p.name for p in (tmp_path / "state").iterdir()}
    resumed = WithAccelerate(models)
    resumed.accelerator.load_state(str(back))
    assert resumed.train(3) == expected[3:]


def test_the_number_of_a_save_that_accelerate_counts_is_said_to_be_one(tmp_path):
    pytest.importorskip("accelerate")
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(str(tmp_path / "project"), automatic_checkpoint_naming=True)
    run = WithAccelerate(project_config=project)
    run.accelerator._custom_objects.clear()
    for count in (2, 3):
        run.train(count)
        run.accelerator.save_state()
    there = tmp_path / "project" / "checkpoints"
    assert {p.name for p in there.iterdir()} == {"checkpoint_0", "checkpoint_1"}
    told = import_here(str(there / "checkpoint_1"), str(tmp_path / "in"))
    note = "step 1 is from the folder's name checkpoint_1, in which Accelerate writes the number of the save"
    assert told["step"] == 1 and note in told["notes"]


def test_the_place_in_the_data_that_a_stateful_loader_saved_comes_back(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("torchdata")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration

    def build():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(1)
        data = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=data)
        model = accelerator.prepare(network())
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loader = accelerator.prepare(DataLoader(torch.arange(20), batch_size=2, shuffle=True))
        return accelerator, model, optimizer, loader

    accelerator, _, _, loader = build()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    accelerator.save_state(str(tmp_path / "step_4"))
    told, back = returned(tmp_path / "step_4", tmp_path)
    assert (told["left_out"], "dl_state_dict" in told["entries"]) == ([], True)
    rest = []
    for folder in (tmp_path / "step_4", back):
        accelerator, _, _, loader = build()
        accelerator.load_state(str(folder))
        rest.append([batch.tolist() for batch in loader])
    assert rest[0] == rest[1]
    assert 0 < len(rest[0]) < 10


# -- Accelerate with FSDP2, and torch.distributed.checkpoint of two ranks


@pytest.mark.parametrize("what", ["sharded", "full", "dcp"])
def test_two_ranks_of_fsdp2_continue_from_what_came_back(what, tmp_path):
    if what != "dcp":
        pytest.importorskip("accelerate")
    expected = ranks("whole", what, tmp_path)
    assert ranks("save", what, tmp_path) == expected[:3]
    told, back = returned(tmp_path / "step_3", tmp_path)
    assert (told["format"], told["step"], told["left_out"]) == ("dcp" if what == "dcp" else "accelerate", 3, [])
    assert {"module", "optimizer"} <= set(told["entries"].values())
    (tmp_path / "step_3").rename(tmp_path / "moved_away")
    back.rename(tmp_path / "step_3")
    assert ranks("resume", what, tmp_path) == expected[3:]


def ranks(verb, what, folder):
    """The losses of rank 0 of two."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        [sys.executable, RANKS, verb, what, folder], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


# -- the Trainer


def trainer(folder, adapter=False, **arguments):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    set_seed(2)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        attention_dropout=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if adapter:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    rows = torch.randint(0, 32, (40, 6), generator=torch.Generator().manual_seed(3))
    told = TrainingArguments(
        output_dir=str(folder), max_steps=6, save_steps=2, logging_steps=1, per_device_train_batch_size=2, seed=4,
        report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2, lr_scheduler_type="cosine", **arguments,
    )  # fmt: skip
    return Trainer(model=model, args=told, train_dataset=[{"input_ids": row, "labels": row} for row in rows])


def losses(run):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in run.state.log_history if "loss" in line]


def trainable(run):
    return {name: value.detach().clone() for name, value in run.model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("step", [2, 4])
def test_the_trainer_continues_from_its_own_folder(adapter, step, tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    if adapter:
        pytest.importorskip("peft")
    whole = trainer(tmp_path / "run", adapter)
    whole.train()
    there = tmp_path / "run" / f"checkpoint-{step}"
    assert check(there) == ("whole", "trainer", "")
    told, back = returned(there, tmp_path)
    assert (told["format"], told["step"]) == ("trainer", step)
    assert {"optimizer", "scheduler", "rng_state", "trainer_state"} <= set(told["entries"])
    assert left_out(told) == {"training_args.bin"} | ({"README.md"} if adapter else set())
    resumed = trainer(tmp_path / "again", adapter)
    resumed.train(resume_from_checkpoint=str(back))
    assert losses(resumed) == losses(whole)
    assert all(torch.equal(value, trainable(whole)[name]) for name, value in trainable(resumed).items())


# -- Lightning


def lightning_run(folder, **arguments):
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self, width=8, betas=(0.9, 0.95)):
            super().__init__()
            self.save_hyperparameters()
            self.network, self.losses = network(), []

        def training_step(self, batch, index):
            # Lightning saves no random states, and begins the data of an epoch anew.
            torch.manual_seed(self.global_step)
            loss = nn.functional.mse_loss(self.network(torch.randn(4, 3)), torch.randn(4, 2))
            self.log("loss", loss)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, betas=self.hparams.betas)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {"seen": torch.tensor(7), "ids": (1, 2)}

        def on_load_checkpoint(self, checkpoint):
            assert checkpoint["mine"]["ids"] == (1, 2)

    lightning.seed_everything(1, verbose=False)
    saves = ModelCheckpoint(folder, monitor="loss", every_n_train_steps=3, save_top_k=-1, save_last=True)
    run = lightning.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=[saves, EarlyStopping("loss", patience=9)], logger=False,
        enable_progress_bar=False, enable_model_summary=False, **arguments,
    )  # fmt: skip
    return run, Module(), DataLoader(range(16), batch_size=4)


@pytest.mark.parametrize("step", [3, 6])
def test_lightning_continues_from_its_own_file(step, tmp_path):
    pytest.importorskip("lightning")
    run, whole, data = lightning_run(tmp_path / "run")
    run.fit(whole, data)
    [there] = (tmp_path / "run").glob(f"*step={step}.ckpt")
    assert check(there) == ("whole", "torch", "")
    told, back = returned(there, tmp_path)
    assert (told["format"], told["step"], told["left_out"]) == ("torch", step, [])
    assert (told["entries"]["model"], told["entries"]["optimizer"]) == ("module", "optimizer")
    run, resumed, data = lightning_run(tmp_path / "again")
    run.fit(resumed, data, ckpt_path=str(back))
    assert (run.global_step, resumed.losses) == (8, whole.losses[step:])
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))
