"""The training loop of a run, with its data, checkpoints, held-out loss and reports."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from thinwire.checkpoint import FROZEN, Disk, Keep, Piece, Saver, Source, store_of_ranks
from thinwire.checkpoint.folder import latest, step_of
from thinwire.collectives import faults
from thinwire.collectives.patience import patience
from thinwire.device import Device
from thinwire.errors import ConfigError
from thinwire.hosts.experts.parallel import ExpertRanks
from thinwire.hosts.pipeline.stage import PipelineStage, Prediction
from thinwire.hosts.sequence import SequenceRanks
from thinwire.hosts.sequence.seams import heads_of
from thinwire.methods.experts import way_text
from thinwire.methods.experts.traffic import Rows, sent
from thinwire.methods.sequence import Shape
from thinwire.methods.sequence.traffic import most_sent
from thinwire.models.capacity import RowLoad
from thinwire.models.hf import HFCausalLM
from thinwire.models.moe import MoELlama
from thinwire.models.seam import mixture_of
from thinwire.models.tensor import activation_bytes
from thinwire.optim.schedule import lr_at
from thinwire.report.machine import peak_rss_bytes, versions
from thinwire.report.metrics import MembershipEvent, StepMetrics
from thinwire.report.progress import Progress
from thinwire.run.place import ProcessPlace
from thinwire.run.run import Run
from thinwire.run.run_dir import RunDir
from thinwire.run.settings import to_toml
from thinwire.run.signals import StopFlag
from thinwire.state.watchdog import Watchdog
from thinwire.table import Row
from thinwire.tiers import TierReading
from thinwire.training.advice import advise
from thinwire.training.agreement import agree, agree_on_start, max_over_ranks
from thinwire.training.engine import Corpus, Engine
from thinwire.training.origin import ISLANDS, Origin, folder_to_read, is_verified, leave_islands, num_islands
from thinwire.training.planned import Planned
from thinwire.training.proof import Proof, circumstances
from thinwire.training.recovery import Reunion, StepStart, Survivor, fallback
from thinwire.training.reporter import Reporter
from thinwire.training.ways import WaysInUse

# Why the meter lacks what a tensor axis sends.
NOT_COUNTED = "sums in every layer, by torch itself: not counted in the bytes of a step"


class Trainer:
    """Builds what a run needs, takes the steps, and measures at the end. `stop` is called before every update.

    Every rank makes one. generation: above 0 after a loss. survivor: the state that this rank took along. Raises
    ConfigError if ranks disagree about the run.
    """

    def __init__(
        self, run: Run, place: ProcessPlace, stop: StopFlag, dtype: str | None, rows: Sequence[Row],
        device: Device | None = None, survivor: Survivor | None = None, generation: int = 0,
    ) -> None:  # fmt: skip
        began = time.monotonic()
        self.config, self.place, self.stop = run.config, place, stop
        self.device = device or Device()
        self.run_dir = RunDir(run.config.run_dir)
        corpus = Corpus.of(run.config)
        self.digest = corpus.digest
        self.dtype = agree(run.config, tokens=self.digest, dtype=dtype)
        saved, saved_rows = (None, []) if generation else self._find_start()
        self.engine = Engine(run, place, self.device, corpus, self.dtype)
        self.model, self.batch, self.loader = self.engine.model, self.engine.batch, self.engine.loader
        self.stage, self.optimizer = self.engine.stage, self.engine.optimizer
        reunion = None
        if generation:
            replicas = run.config.mesh_shape.sizes["data"]
            reunion = Reunion.of(survivor, generation, replicas=replicas, tied=self.engine.ends_are_tied)
        if reunion is not None and reunion.why_not:
            saved, saved_rows = self._fall_back(reunion, survivor)
            reunion = survivor = None
        self.ways = WaysInUse.of(run, self.engine)
        advice = self._advice()
        self.saver = self._open_saver()
        self._about = self._account()
        self._proof: Proof | None = None
        self._prediction: Prediction | None = None
        self._expert_rows: torch.Tensor | None = None
        # A checkpoint of this step has its next loss already, or another layout's loss would follow.
        self._known_after = -1
        self.step = 0
        self.engine.settle(self._batches_on_meta)
        load_report = self._begin(saved, reunion, survivor)
        self._watchdog = Watchdog(run.config.dead_steps)
        self._first_step = self.step
        self._moved = self._moved_so_far()
        self.reporter: Reporter | None = None if survivor is None else survivor.reporter
        self.onlooker: Progress | None = None
        own_rows = [*advice, *self._rows_on_options()]
        if self.reporter is None:
            self._open_report([*self._device_rows(), *rows], [*saved_rows, *load_report], own_rows)
        self._report_changes()
        if reunion is not None and self.reporter is not None:
            how = run.pipeline.recover if run.pipeline else ""
            self.reporter.membership(reunion.event(how, survivor.lost_at if survivor else began))
        islands = self.place.island.num_islands
        comm = self.optimizer.everyone
        self._planned = Planned(run.config, comm, self._warn, islands) if run.config.plan else None
        # What measuring the links sent belongs to no step.
        self._traffic = self._first_traffic = self.optimizer.meter.snapshot()
        if not generation:
            self._arm_faults()
            patience().announce = self._tell
        self._step_start = self._note_start()

    def _find_start(self) -> tuple[Path | None, list[Row]]:
        """The checkpoint from which all ranks go on, None for the beginning, and rows on it; a collective."""
        place, folder = self.place, folder_to_read(self.run_dir, self.place.island)
        # The launcher has verified the first island's checkpoints on the first machine, unless none was sound.
        verifies = place.local_rank == 0 and (place.number > 0 or not is_verified(folder))
        return agree_on_start(folder, verifies=verifies, island=place.island)

    def _fall_back(self, reunion: Reunion, survivor: Survivor | None) -> tuple[Path | None, list[Row]]:
        """The same for a run in which what is left of a step can't be gone on from."""
        saved, rows = self._find_start()
        rows = [*rows, ("recover", fallback(reunion, step_of(saved)), "")]
        if survivor is not None and survivor.reporter is not None:
            survivor.reporter.close()
        return saved, rows

    def _advice(self) -> list[Row]:
        """Rows on what would suit the links better; a collective, since ranks measure together."""
        if self.stage.pipeline is not None:
            return []
        tokens_per_rank = self.batch.tokens_per_step // self.engine.num_shares
        dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float32
        found = advise(
            self.optimizer, self.config.strategy, self.engine.num_parameters, tokens_per_rank, dtype, self.device
        )
        return list(found)

    def _open_saver(self) -> Saver:
        """What writes checkpoints; a collective."""
        config, place = self.config, self.place
        disk = Disk.find(self.run_dir.checkpoints, place.rank, self._numbers_of_ranks)
        store = store_of_ranks(place.rank, place.world_size, self._numbers_of_ranks)
        keep = Keep(config.keep_last, config.keep_every, config.keep_best)
        return Saver(self.run_dir.checkpoints, disk, store, keep, config.timeout)

    def _account(self) -> dict[str, Any]:
        """What every checkpoint says of the run; training would stand still while it is put together."""
        config, place = self.config, self.place
        about: dict[str, Any] = {
            "strategy": config.strategy,
            "versions": versions(),
            "circumstances": self._circumstances,
            ISLANDS: place.island.num_islands,
            "config": to_toml(config),
        }
        if config.mesh_shape.pipeline * config.mesh_shape.tensor > 1:
            about["mesh"] = str(config.mesh_shape)
        return about

    def _begin(self, saved: Path | None, reunion: Reunion | None, survivor: Survivor | None) -> list[Row]:
        """Take the state of others, of a checkpoint or of a log, at `step`; the load report of a checkpoint."""
        self._follow()
        # An island that has joined others has their state; its own older checkpoint is of no use.
        if reunion is not None:
            self.step = reunion.restore(survivor, self.engine, self.engine.seed_after)
        elif not self.step and (kept := self._kept_after(step_of(saved))) is not None:
            self.step, report = self._take_over(kept)
            return report
        elif saved and not self.step:
            self.step, report = self._take_over(Source(saved, self.place.rank))
            return report
        elif not self.step:
            self.step = self._catch_up()
        return []

    def _kept_after(self, step: int) -> Source | None:
        """A step that is later than this one, and on the disks of all ranks."""
        found = None if self.optimizer.journal is None else self.optimizer.journal.found
        return None if found is None or found.manifest.step <= step else found

    def _rows_on_options(self) -> Iterator[Row]:
        """Rows on what ranks send each other beside a strategy's bytes, and on a sample and a teacher."""
        config, lessons = self.config, self.engine.distillation
        if self.stage.pipeline is not None:
            yield self._border_row(self.stage.pipeline, self._batches_on_meta)
        if self.engine.why_whole:
            what = "the disk" if self.stage.pipeline is None else "the own stage"
            yield f"weights of {what} alone", "the whole model on every rank, at first", self.engine.why_whole
        if self.engine.is_uncounted:
            why = "of such a model nobody knows them without a step of it: leave room for them"
            yield "activations", "not counted in the budget", why
        if config.sample_tokens and (self.optimizer.weights_pass or self.optimizer.weights_stay_cut):
            where = "read all weights from the disk" if self.optimizer.weights_pass else "gather all weights"
            why = f"every token would {where}; `thinwire generate` needs them in memory"
            yield f"--sample-tokens {config.sample_tokens}", "none", why
        if lessons is not None:
            why = "stated" if config.teacher_weight is not None else "with which both losses are equal before this step"
            yield f"--teacher {config.teacher}", f"its experts teach, weight {lessons.weight:.4g}", why
        if self.engine.end is not None:
            why = f"token {self.engine.end} ends a document, and is not asked what follows it"
            yield "--documents", "a token attends to its own document alone", why
        if config.mesh_shape.tensor > 1:
            yield self._tensor_row()
        if self.stage.sequence is not None:
            yield self._sequence_row(self.stage.sequence)
        if self.stage.experts is not None and self.stage.experts.placement.ranks > 1:
            yield self._expert_row(self.stage.experts)

    def _open_report(self, rows: Sequence[Row], loaded: Sequence[Row], own_rows: Sequence[Row]) -> None:
        """Rank 0 reports; the first rank of each other machine shows the progress, and `rows` alone."""
        config, place, whole = self.config, self.place, self.stage.uncompressed_bytes_per_step
        if place.rank == 0:
            tokens = f"{self.engine.corpus.num_tokens:,} tokens"
            data_row = (f"data {config.data}", tokens, f"tokenizer {config.tokenizer}")
            self.reporter = Reporter(
                config, first_step=self.step, world_size=place.num_ranks, uncompressed_bytes=whole,
                rows=[data_row, *rows, *loaded, *self.stage.describe(), *own_rows],
            )  # fmt: skip
        elif place.is_first_of_machine:
            sender = f"rank {place.rank}" if self.stage.pipeline is not None else ""
            self.onlooker = Progress(config.steps, self.batch.tokens_per_step, whole, sender)
            self.onlooker.start_table([*rows, ("metrics, summary and report", "on node 0", "where rank 0 is")])

    def survivor(self) -> Survivor:
        """The state that this rank takes along after the loss of another. The trainer can't be used afterwards."""
        assert self._step_start is not None
        return Survivor.of(self._step_start, self.engine, self.saver, self.reporter)

    def _note_start(self) -> StepStart | None:
        """Note the start of the next step, in a run that may have to repeat it."""
        pipeline = self.stage.pipeline
        return StepStart.of(self.step, self.engine) if pipeline is not None and pipeline.ends is not None else None

    @property
    def _batches_on_meta(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A step's micro-batches, without memory."""
        tokens = torch.empty(self.batch.micro_batch, self.config.seq_len, device="meta")
        return [(tokens, tokens)] * self.batch.accumulation

    def _border_row(self, pipeline: PipelineStage, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Row:
        """A row about what stages send each other in a step."""
        sent = pipeline.sent_bytes(batches)
        shown = ", ".join(f"{num / 1e6:.3f}" for num in sent)
        whole = self.stage.uncompressed_bytes_per_step / 1e6
        why = f"whole models on all ranks that average gradients in fp32 would send {whole:.3f} MB each"
        return "stages send each other, a step", f"{shown} MB, by rank of a pipeline", why

    def _tensor_row(self) -> Row:
        """A row about what torch sends on the tensor axis in a step, which no meter counts."""
        model, shape = self.engine.model, self.config.mesh_shape
        of_model: Any = model.model.config if isinstance(model, HFCausalLM) else model.config
        tokens = self.batch.micro_batch * self.batch.accumulation * self.config.seq_len
        layers, itemsize = -(-of_model.num_hidden_layers // shape.pipeline), 2 if self.dtype == "bf16" else 4
        sent = activation_bytes(of_model, tokens, shape.tensor, layers, itemsize)
        return "ranks of a tensor axis send each other, a step", f"about {sent / 1e6:.3f} MB a rank", NOT_COUNTED

    def _expert_row(self, experts: ExpertRanks) -> Row:
        """A row about the rows that travel to experts and back in a step, beside gradients and weights."""
        sizes, placement, local = mixture_of(self.engine.model), experts.placement, experts.comm.topology.local_size
        assert sizes is not None
        tokens = self.batch.micro_batch * self.config.seq_len // self.config.mesh_shape.sequence
        dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float32
        nodes, passes = placement.ranks // local, self.batch.accumulation
        rows = Rows.even(placement, tokens, sizes.top_k, sizes.width, dtype, nodes, passes=passes)
        part_numel = sizes.experts * sizes.expert_numel // placement.ranks
        of_layer = sent(placement, rows, experts.options, part_numel, local)
        own = sum(num_bytes for (rank, _), num_bytes in of_layer.items() if rank == experts.comm.rank)
        of_step = own * sizes.layers * passes
        why = f"in {sizes.layers} layers, with an even router; each step counts what it was"
        return "rows to experts and back, a step, besides", f"about {of_step / 1e6:.3f} MB a rank", why

    def _sequence_row(self, sequence: SequenceRanks) -> Row:
        """A row about what the ranks of a sequence send each other in a step."""
        heads, kv_heads, width, layers = heads_of(self.engine.model)
        tokens, itemsize = self.batch.micro_batch * self.config.seq_len, 2 if self.dtype == "bf16" else 4
        shape = Shape(heads, kv_heads, width, tokens, layers, itemsize)
        most = self.batch.accumulation * most_sent(sequence.layout, shape, sequence.options, self.config.seq_len)
        sent, why = f"{most / 1e6:.3f} MB a rank", f"in {layers} layers"
        if self.config.documents and sequence.layout.ring > 1:
            sent, why = f"at most {sent}", f"{why}; blocks without a document in common do not travel"
        return "ranks of a sequence send each other, a step", sent, why

    @property
    def _circumstances(self) -> dict[str, Any]:
        """What must be equal for two losses of the same weights and tokens to have the same bits."""
        return circumstances(self.batch, self.place.world_size, self.dtype, self.device.name) | self._layout

    @property
    def _layout(self) -> dict[str, str]:
        """How ranks share a sequence or the experts, and to what a capacity applies; each changes the order of sums."""
        sequence, experts = self.stage.sequence, self.stage.experts
        found = {} if sequence is None else {"sequence": str(sequence.layout)}
        if isinstance(self.model, MoELlama) and self.model.capacity_factor:
            ranks, tokens = self.engine.num_shares, self.batch.micro_batch * self.config.seq_len
            found["capacity"] = f"{self.model.capacity_factor} of {tokens} tokens x {self.batch.accumulation} x {ranks}"
        if experts is not None:
            found["experts"] = f"{experts.placement}, {way_text(experts.options)}"
        return found

    def _device_rows(self) -> list[Row]:
        """Rows about what a GPU computes in, which the launcher has left open."""
        return [] if self.device.kind == "cpu" else [("device", self.device.name, f"computes in {self.dtype}")]

    def run(self) -> None:
        """Take the remaining steps, then measure, save and report. Ends early if any rank was asked to stop."""
        stopped, last = "", min(self.config.steps, self.config.stop_at or self.config.steps)
        while self.step < last and not stopped:
            self._take_step()
            if self.optimizer.stop_requested:
                stopped = self.stop.reason or "a signal to another rank"
            elif self.step < last and self._saves_now:
                self._save()
        if self.step < self.config.steps and not stopped:
            stopped = f"--stop-at {self.config.stop_at}"
        if self.optimizer.has_own_pace:
            stopped = self._meet(stopped)
        elif not stopped and self.optimizer.has_islands:
            self._finish()
        self._save()
        self._note_next_loss(self.engine.next_loss())
        self.saver.close()
        problems = self._warn_of_saves()
        unsaved = self._unsaved(problems[-1]) if self.saver.last_step != self.step else ""
        heldout_loss = None
        if not stopped:
            self.optimizer.synchronize()
            heldout_loss = self._evaluate() if self.config.eval_sequences else None
        for fault in faults.disarm():
            self._tell(f"thinwire: rank {self.place.rank}: --inject {str(fault)!r} never happened")
        if self._planned is not None and not stopped:
            self._planned.compare_links("while the plan was followed")
        peak_rss, peak_allocated = max_over_ranks(peak_rss_bytes()), max_over_ranks(self.device.peak_bytes())
        # The ranks that hold the first rank's matrices between them compute together.
        sample = self._sample() if not stopped and self.engine.writes_sample else ""
        sent_bytes = self.optimizer.meter.snapshot().sent_bytes
        self.engine.close()
        if self.optimizer.journal is not None and not unsaved:
            self.optimizer.journal.delete()
        if self.onlooker is not None:
            self.onlooker.say(f"{stopped or 'finished'} after step {self.step}; node 0 has the results")
        if self.reporter is not None:
            if (moved := self._moved_so_far()).write_s:
                wrote_mb = moved.written_bytes / 1e6
                self.reporter.progress.say(
                    f"this rank's disk: {wrote_mb:.1f} MB written in this run, at {wrote_mb / moved.write_s:.0f} MB/s"
                )
            self.reporter.finish(
                step=self.step, skipped_steps=self.optimizer.skipped_steps, heldout_loss=heldout_loss,
                stopped=stopped or "finished", sample=sample,
                parameters=self.engine.num_parameters, peak_rss_bytes=peak_rss, unsaved=unsaved,
                device=self.device.name, dtype=self.dtype, peak_allocated_bytes=peak_allocated,
                sent_bytes=sent_bytes, sent_by=self._sent_by(),
                expert_rows=[] if self._expert_rows is None else self._expert_rows.long().tolist(),
            )  # fmt: skip

    def _sent_by(self) -> dict[str, float]:
        """Bytes that rank 0 has sent in a step, on average, by operation and level."""
        sent, steps = self._traffic - self._first_traffic, max(1, self.step - self._first_step)
        found = {f"{name}, {level}": each.sent_bytes / steps for (name, level), each in sent.operations.items()}
        return {name: num_bytes for name, num_bytes in sorted(found.items()) if num_bytes}

    def _finish(self) -> None:
        """Leave the result in the model, and report its cost, which belongs to no single step."""
        start = time.perf_counter()
        self.optimizer.finish()
        traffic = self.optimizer.meter.snapshot()
        sent, self._traffic = traffic - self._traffic, traffic
        if self.reporter is not None:
            self.reporter.last_exchange(sent.sent_bytes, time.perf_counter() - start)

    def _meet(self, stopped: str) -> str:
        """Wait for all ranks, at the slowest rank's step. Return why they stopped; empty if they did not."""
        self._finish()
        self.loader.skip_steps(self.optimizer.steps - self.step)
        self.step = self.optimizer.steps
        return stopped or ("a signal to another rank" if self.optimizer.stop_requested else "")

    @property
    def _saves_now(self) -> bool:
        every = 0 if self.optimizer.has_own_pace else self.config.checkpoint_every
        return every > 0 and self.step % every == 0

    def _warn(self, text: str) -> None:
        if self.reporter is not None:
            self.reporter.progress.warn(text)

    def _arm_faults(self) -> None:
        """Arm the faults for this process; not again in a process that was restarted."""
        if not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            island = self.place.island.number if self.optimizer.has_islands else None
            told = map(faults.parse, self.config.inject)
            stage = None if self.stage.pipeline is None else self.stage.pipeline.number
            faults.arm(told, rank=self.place.rank, island=island, stage=stage, announce=self._tell)

    def _tell(self, text: str) -> None:
        """Print it on the terminal. Ranks other than 0 write it to a file, which the launcher prints."""
        if self.place.number == 0 and self.reporter is not None:
            self.reporter.progress.warn(text)
            return
        faults.say(text)
        self.run_dir.logs.mkdir(parents=True, exist_ok=True)
        with self.run_dir.faults.open("a") as log:
            log.write(f"{text}\n")

    def _follow(self) -> None:
        """Skip the steps that the other islands took while this one was away or had not started."""
        if (position := self.optimizer.position) is not None:
            self.loader.skip_steps(position - self.step)
            self.step = position

    def _report_changes(self) -> None:
        for change in self.optimizer.take_changes():
            if self.reporter is not None:
                now = change.membership
                self.reporter.membership(
                    MembershipEvent(
                        self.step, now.generation, list(now.members), list(now.lost), list(now.joined),
                        round(change.cost_s, 3), change.how,
                    )
                )  # fmt: skip

    def _take_step(self) -> None:
        faults.at_step(self.step + 1)
        start = time.perf_counter()
        optimizer, before = self.optimizer, self.optimizer.meter.snapshot()
        lr = lr_at(
            self.step + 1, peak=self.config.lr, num_warmup_steps=self.config.num_warmup_steps,
            num_steps=self.config.steps,
        )  # fmt: skip
        self.engine.set_lr(lr)
        forward_s = self.engine.forward_backward()
        if self.stop.reason:
            optimizer.request_stop()
        rows, experts_s = self.engine.take_row_load(), self.engine.take_experts_s()
        predicted_experts_s = self.ways.note(rows, experts_s) if self.ways is not None else 0.0
        # From here on all ranks know the loss, the norm of the gradient, and whether any rank wants to stop.
        grad_norm = float(self.stage.reduce())
        # The weights of this step travel during the next one's forward, with which they are counted.
        traffic = optimizer.meter.snapshot()
        self.engine.update()
        if optimizer.has_islands or optimizer.has_own_pace:
            # Messages between islands are sent and awaited at the end of a step.
            traffic = optimizer.meter.snapshot()
        self.step += 1
        self._step_start = self._note_start()
        if optimizer.journal is not None:
            optimizer.commit(*self._own_state(), self._about)
        spent = optimizer.meter.snapshot() - before
        sent, self._traffic = traffic - self._traffic, traffic
        before_step, self._moved = self._moved, self._moved_so_far()
        moved = self._moved - before_step
        step_s = time.perf_counter() - start
        self._compare_losses(optimizer.mean_loss)
        if teller := self.reporter or self.onlooker:
            teller.step(
                StepMetrics(
                    step=self.step, loss=optimizer.mean_loss, tokens=self.step * self.batch.tokens_per_step,
                    step_s=step_s, compute_s=step_s - spent.exposed_s - moved.wait_s, exposed_comm_s=spent.exposed_s,
                    sent_bytes=sent.sent_bytes, received_bytes=sent.received_bytes, lr=lr, grad_norm=grad_norm,
                    codec_s=spent.encode_s + spent.decode_s, forward_s=forward_s,
                    sent_weight_bytes=sent.sent_by("weights"), peak_allocated_bytes=self.device.peak_bytes(),
                    damaged_messages=sent.num_damaged, **self._of_pipeline(), disk_read_bytes=moved.read_bytes,
                    disk_written_bytes=moved.written_bytes, disk_s=moved.read_s + moved.write_s,
                    exposed_disk_s=moved.wait_s, dropped_rows=rows.dropped_share, needed_capacity=rows.needed,
                    experts_s=experts_s, predicted_experts_s=predicted_experts_s,
                )
            )  # fmt: skip
        self._count_rows(rows)
        self._change_way()
        self._watch_gradient(grad_norm)
        self._warn_of_saves()
        self._follow()
        self._report_changes()

    def _count_rows(self, load: RowLoad) -> None:
        """Add a step's rows of each expert to those of the run."""
        if load.counts is not None:
            counts = load.counts.sum(0)
            self._expert_rows = counts if self._expert_rows is None else self._expert_rows + counts

    def _change_way(self) -> None:
        """Let the rows of experts travel as the step's word says."""
        change = None if self.ways is None else self.ways.follow(self.step)
        self._about = {**self._about, "circumstances": self._circumstances} if self.ways is not None else self._about
        if change is not None and self.reporter is not None:
            self.reporter.way(change)

    def _moved_so_far(self) -> TierReading:
        """Bytes moved to and from this rank's disk so far."""
        return TierReading() if self.optimizer.tiers is None else self.optimizer.tiers.snapshot()

    def _of_pipeline(self) -> dict[str, float]:
        """The metrics of a pipeline's last step. The first prediction is also printed."""
        pipeline = self.stage.pipeline
        if pipeline is None:
            return {}
        found = {"pipeline_s": pipeline.step_s, "bubble": 1 - pipeline.busy_s / max(pipeline.step_s, 1e-9)}
        prediction = self._prediction
        if prediction is not None:
            found |= {"predicted_pipeline_s": prediction.step_s, "predicted_bubble": prediction.bubbles[0]}
        if pipeline.prediction is not prediction and self.reporter is not None:
            why = f"a link has drifted, {pipeline.why_planned}; " if pipeline.why_planned else ""
            self.reporter.progress.say(
                f"{why}the pipeline from now on, simulated with the times of the step before: {pipeline.prediction}"
            )
        # Of the steps that follow.
        self._prediction = pipeline.prediction
        if pipeline.trace and self.reporter is not None:
            self.reporter.timeline(pipeline.trace)
        # Of one step alone.
        pipeline.trace = pipeline.trace and []
        return found

    def _watch_gradient(self, norm: float) -> None:
        """Warn of every skipped step. End a run whose gradients stay zero or not finite."""
        if self.reporter is not None and not math.isfinite(norm):
            self.reporter.progress.warn(f"step {self.step} skipped on all ranks: a gradient is not finite")
        self._watchdog.note(norm, self.step)

    def _evaluate(self) -> float:
        """See Engine.evaluate."""
        if self.reporter is not None:
            self.reporter.progress.say("measuring the held-out loss ...")
        return self.engine.evaluate()

    def _sample(self) -> str:
        """Text that the model writes after the prompt."""
        if not self.config.sample_tokens:
            return ""
        tokenizer = self.engine.corpus.tokenizer
        prompt = [int(token) for token in tokenizer.encode(self.config.prompt)]
        prompt = prompt or [tokenizer.end_of_document or 0]
        return tokenizer.decode(self.engine.continued(prompt, self.config.sample_tokens))

    def _catch_up(self) -> int:
        """Step from which a run without a checkpoint continues: 0, or the last that a strategy replays from its log."""
        step = self.optimizer.catch_up()
        self.loader.skip_steps(step)
        return step

    def _save(self) -> None:
        """Start to write a checkpoint, if replicas still have the same bits on all ranks."""
        self.optimizer.check_replicas()
        snapshot = self.stage.snapshot()
        snapshot.pieces |= {f"{FROZEN}/{name}": Piece.whole(tensor) for name, tensor in self.engine.frozen.items()}
        own, common = self._own_state()
        snapshot.own |= own
        snapshot.common |= common
        loss = self.optimizer.mean_loss
        self.saver.save(self.step, snapshot, loss=loss if math.isfinite(loss) else None, about=self._about)

    def _own_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the trainer saves: of this rank, and the same on all ranks."""
        own = {"rng": torch.get_rng_state(), "buffers": self.engine.buffers}
        if (device_rng := self.device.random_state()) is not None:
            own["device_rng"] = device_rng
        position = {"step": self.step, "tokens": self.digest, "loader": self.loader.state_dict()}
        position |= {} if self.ways is None else {"way": self.ways.name}
        return {"trainer": own}, {"trainer": position, "shapes": self.engine.shapes}

    def _take_over(self, source: Source) -> tuple[int, list[Row]]:
        """Continue from a checkpoint of any layout, or from the step that the optimizer has found on this rank's disk.

        Return its step and the load report; sets `_proof`.
        """
        saved, island = source.folder, self.place.island
        position = source.common["trainer"]
        if position["tokens"] != self.digest:
            raise ConfigError(f"data {self.config.data} is not the data that {saved} was trained on: bring it back")
        if source.common["shapes"] != self.engine.shapes:
            raise ConfigError(f"{saved} holds another model: names and shapes of parameters must be the same")
        is_kept = self.optimizer.journal is not None and source is self.optimizer.journal.found
        if not is_kept:
            self.stage.restore(source)
            source.read({f"{FROZEN}/{name}": Piece.whole(tensor) for name, tensor in self.engine.frozen.items()})
            self.saver.last_step = position["step"]
        self.loader.load_state_dict(position["loader"])
        if self.ways is not None:
            self.ways.go_on(position.get("way", ""))
            self._about["circumstances"] = self._circumstances
        before = num_islands(saved)
        has_own = is_kept or (island.number < before and saved.parent == self.run_dir.checkpoints)
        random_rows = self._restore_random_state(source, position["step"], before, has_own=has_own)
        origin = Origin.of(source, before, has_own=has_own)
        if before > island.num_islands == 1 and not self.optimizer.has_islands:
            origin = leave_islands(source, before, self.stage, self.place.rank)
        elif before != island.num_islands:
            origin = origin.with_islands(island.num_islands)
        if origin.next_loss is not None or not source.is_same:
            self._known_after = position["step"]
        proof_row = self._prepare_proof(source, origin, position["step"])
        return position["step"], [*source.report(), *random_rows, *origin.rows, proof_row]

    def _prepare_proof(self, source: Source, origin: Origin, step: int) -> Row:
        """Decide what the first loss must be. Islands that must still be made equal are compared before that."""
        row: Row = ("resume proof", "none", origin.why_unknown)
        if origin.next_loss is not None:
            self._proof = Proof.of(source, origin.next_loss, self._about["circumstances"])
            row = self._proof.row
        if not self.optimizer.has_islands or source.is_same:
            return row
        if self._proof is not None:
            loss = self.engine.next_loss()
            # A run without islands has saved the loss over the data of all of them.
            loss = self.optimizer.mean_over_islands(loss) if origin.num_islands == 1 else loss
            line = self._proof.check(step + 1, loss, allow_drift=self.config.allow_resume_drift)
            self._proof, row = None, ("resume proof", "made before islands are levelled", line)
        source.note(*self.optimizer.level(has_own=origin.has_own))
        return row

    def _restore_random_state(self, source: Source, step: int, before: int, *, has_own: bool) -> list[Row]:
        """Restore this rank's random state and the buffers; with another number of ranks, or another mesh, seed anew.

        before: number of islands that saved. has_own: whether this island was one of them. Returns rows about a GPU's
        state.
        """
        place = self.place
        count = place.island.num_islands
        is_same_world = has_own and (source.world_size, before) == (place.world_size, count)
        own = source.own("trainer", rank=None if is_same_world else 0)
        for name, tensor in self.engine.buffers.items():
            tensor.copy_(own["buffers"][name])
        # Ranks of a tensor axis must draw alike, and other axes have other neighbours.
        meshes = [about.get("mesh", "data alone") for about in (source.manifest.about, self._about)]
        if is_same_world and meshes[0] == meshes[1]:
            torch.set_rng_state(own["rng"])
            return self._restore_device_random_state(own, step)
        torch.manual_seed(self.engine.seed_after(step))
        ranks = f"{source.world_size} ranks had them and there are {place.world_size}"
        if is_same_world:
            ranks = f"a mesh of {meshes[0]} had them and this is {meshes[1]}"
        elif max(before, count) > 1:
            ranks = f"{before} x {source.world_size} ranks had them and there are {count} x {place.world_size}"
        source.note("random states", "dropped", f"{ranks}: seeded anew from --seed, rank and step")
        source.note("data position", "carried", "counted in sequences over all ranks")
        return []

    def _restore_device_random_state(self, own: dict[str, Any], step: int) -> list[Row]:
        """Restore a GPU's random state. A checkpoint from a CPU has none."""
        if self.device.random_state() is None:
            return []
        if "device_rng" in own:
            self.device.set_random_state(own["device_rng"])
            return []
        self.device.seed(self.engine.seed_after(step))
        return [("random state of the GPU", "new", "the CPU had none: seeded from --seed, rank and step")]

    def _compare_losses(self, loss: float) -> None:
        """Record the first loss after a save, for a later resume. Compare the first loss after a resume."""
        if self.step == self.saver.last_step + 1:
            self._note_next_loss(loss)
        if self._proof is not None:
            line = self._proof.check(self.step, loss, allow_drift=self.config.allow_resume_drift)
            self._proof = None
            if self.reporter is not None:
                self.reporter.progress.say(line)

    def _note_next_loss(self, loss: float) -> None:
        """Record the loss of the step after the last checkpoint, unless known.

        A checkpoint of another layout has none.
        """
        if self.saver.last_step != self._known_after and math.isfinite(loss):
            self.saver.note_next_loss(loss)

    def _warn_of_saves(self) -> list[str]:
        """Print checkpoints that could not be written, and why; training continues."""
        problems = self.saver.problems()
        for problem in problems:
            if self.reporter is not None:
                self.reporter.progress.warn(f"{problem}; training goes on, and earlier checkpoints are as they were")
        return problems

    def _unsaved(self, problem: str) -> str:
        """The message at the end of a run whose last checkpoint could not be written."""
        newest = step_of(latest(self.run_dir.checkpoints))
        left = f"the newest checkpoint is of step {newest}" if newest else "there is no checkpoint"
        return f"the end of this run is not saved: {problem}; {left}"

    def _numbers_of_ranks(self, number: int) -> list[int]:
        comm = self.optimizer.everyone
        return [int(n) for n in comm.wait(comm.all_gather_exact(torch.tensor([number])))]
