"""The training loop of a run: its start, its steps, and what is measured at the end."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

from thinwire.collectives import faults
from thinwire.collectives.patience import patience
from thinwire.device import Device
from thinwire.optim.schedule import lr_at
from thinwire.report.machine import peak_rss_bytes
from thinwire.report.metrics import OF_MESSAGES, MembershipEvent, StepMetrics, TrafficEvent
from thinwire.report.progress import Progress
from thinwire.run.place import ProcessPlace
from thinwire.run.run import Run
from thinwire.run.run_dir import RunDir
from thinwire.run.signals import StopFlag
from thinwire.state.watchdog import Watchdog
from thinwire.table import Row
from thinwire.training.account import StepAccount
from thinwire.training.agreement import agree, max_over_ranks
from thinwire.training.checkpoints import Checkpoints
from thinwire.training.engine import Corpus, Engine
from thinwire.training.kept_steps import free_kept
from thinwire.training.planned import Planned
from thinwire.training.recovery import Reunion, StepStart, Survivor
from thinwire.training.reporter import Reporter
from thinwire.training.resume import begin, fall_back, find_start
from thinwire.training.start_rows import rows_on_links, rows_on_options
from thinwire.training.ways import WaysInUse, on_each_rank


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
        self.dtype = agree(run.config, tokens=corpus.digest, dtype=dtype)
        saved, saved_rows = (None, []) if generation else find_start(self.run_dir, place)
        self.engine = Engine(run, place, self.device, corpus, self.dtype)
        self.model, self.batch, self.loader = self.engine.model, self.engine.batch, self.engine.loader
        self.stage, self.optimizer = self.engine.stage, self.engine.optimizer
        if self.optimizer.journal is not None and place.local_rank == 0:
            self.run_dir.note_store(self.optimizer.journal.folder.parent)
        reunion = None
        if generation:
            replicas = run.config.mesh_shape.sizes["data"]
            reunion = Reunion.of(survivor, generation, replicas=replicas, tied=self.engine.ends_are_tied)
        if reunion is not None and reunion.why_not:
            saved, saved_rows = fall_back(self.run_dir, place, reunion, survivor)
            reunion = survivor = None
        self.ways = WaysInUse.of(run, self.engine)
        advice = rows_on_links(self.engine)
        self.checkpoints = Checkpoints(self.engine, self.ways)
        self.engine.settle()
        self.step, load_report = begin(self.checkpoints, saved, reunion, survivor)
        self._watchdog = Watchdog(run.config.dead_steps)
        self._account = StepAccount(self.engine, self.step)
        self._links = run.links or run.attention_links
        self.reporter: Reporter | None = None if survivor is None else survivor.reporter
        self.onlooker: Progress | None = None
        own_rows = [*advice, *rows_on_options(self.engine)]
        if self.reporter is None:
            self._open_report([*self._device_rows(), *rows], [*saved_rows, *load_report], own_rows)
        if run.links is not None and self.reporter is not None:
            # The start-up table says why.
            self.reporter.way(self.ways.begun(self.step) if self.ways else on_each_rank(self.step), is_news=False)
        self._report_changes()
        # Of the last step on which all ranks agreed.
        self._row: StepMetrics | None = None if reunion is None or reunion.start is None else reunion.start.row
        if reunion is not None and self.reporter is not None:
            if self._row is not None:
                self.reporter.complete(self._row)
            how = run.pipeline.recover if run.pipeline else ""
            self.reporter.membership(reunion.event(how, survivor.lost_at if survivor else began))
        islands = self.place.island.num_islands
        comm = self.optimizer.everyone
        self._planned = Planned(run.config, comm, self._warn, islands) if run.config.plan else None
        self._account.open()
        if not generation:
            self._arm_faults()
            patience().announce = self._tell
        self._step_start = self._note_start()

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
            self.onlooker = Progress(
                config.steps, self.batch.tokens_per_step, whole, sender, whole=config.mesh_shape.shares_work
            )  # fmt: skip
            self.onlooker.start_table([*rows, ("metrics, summary and report", "on node 0", "where rank 0 is")])

    def survivor(self) -> Survivor:
        """The state that this rank takes along after the loss of another. The trainer can't be used afterwards."""
        assert self._step_start is not None
        return Survivor.of(self._step_start, self._row, self.engine, self.checkpoints.saver, self.reporter)

    def _note_start(self) -> StepStart | None:
        """Note the start of the next step, in a run that may have to repeat it."""
        pipeline = self.stage.pipeline
        recovers = pipeline is not None and pipeline.ends is not None
        return StepStart.of(self.step, self.engine, self._row) if recovers else None

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
        self.checkpoints.note_next_loss(self.engine.next_loss())
        self.checkpoints.saver.close()
        problems = self._warn_of_saves()
        unsaved = self.checkpoints.unsaved(problems[-1]) if self.checkpoints.saver.last_step != self.step else ""
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
        if self.optimizer.journal is not None:
            if not unsaved:
                self.optimizer.journal.delete()
            # What other ranks delete themselves is not freed for them.
            max_over_ranks(0)
        if self.place.local_rank == 0 and not unsaved:
            for line in free_kept(self.run_dir, self.step):
                self._say(line)
        if self.onlooker is not None:
            self.onlooker.say(f"{stopped or 'finished'} after step {self.step}; node 0 has the results")
        if self.reporter is not None:
            if (moved := self._account.moved_so_far()).write_s:
                wrote_mb = moved.written_bytes / 1e6
                self.reporter.progress.say(
                    f"this rank's disk: {wrote_mb:.1f} MB written in this run, at {wrote_mb / moved.write_s:.0f} MB/s"
                )
            self.reporter.finish(
                step=self.step, skipped_steps=self.optimizer.skipped_steps, heldout_loss=heldout_loss,
                stopped=stopped or "finished", sample=sample,
                parameters=self.engine.num_parameters, peak_rss_bytes=peak_rss, unsaved=unsaved,
                device=self.device.name, dtype=self.dtype, peak_allocated_bytes=peak_allocated,
                sent_bytes=sent_bytes, messages=self._messages(), expert_rows=self._account.expert_rows,
            )  # fmt: skip

    def _save(self) -> None:
        """Save, and record the messages and the way so far: a run that resumes later knows only its last part."""
        self.checkpoints.save(self.step)
        shares_layers = self.stage.experts is not None or self.config.mesh_shape.sequence > 1
        if self.reporter is not None and shares_layers and self.step > self._account.first_step:
            self.reporter.traffic(self._messages())
            if self.ways is not None and (way := self.ways.measured()) is not None:
                self.reporter.way(way, is_news=False)

    def _messages(self) -> TrafficEvent:
        """Bytes and seconds of a step's messages so far."""
        simulated = self.ways.predicted_streams_s if self.ways is not None else None
        found = self._account.messages(self.step, self._links, simulated)
        return TrafficEvent(self.step, self._account.first_step, *(found[kind] for kind in OF_MESSAGES))

    def _finish(self) -> None:
        """Leave the result in the model, and report its cost, which belongs to no single step."""
        start = time.perf_counter()
        self.optimizer.finish()
        sent_bytes = self._account.last_exchange_bytes()
        if self.reporter is not None:
            self.reporter.last_exchange(sent_bytes, time.perf_counter() - start)

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

    def _say(self, text: str) -> None:
        """Print it on this machine's terminal."""
        if self.reporter is not None:
            self.reporter.progress.say(text)
        elif self.onlooker is not None:
            self.onlooker.say(text)

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
        account, optimizer = self._account, self.optimizer
        account.begin()
        lr = lr_at(
            self.step + 1, peak=self.config.lr, num_warmup_steps=self.config.num_warmup_steps,
            num_steps=self.config.steps,
        )  # fmt: skip
        self.engine.set_lr(lr)
        forward_s = self.engine.forward_backward()
        if self.stop.reason:
            optimizer.request_stop()
        rows, experts_s = self.engine.take_row_load(), self.engine.take_experts_s()
        teacher_loss = self.engine.take_teacher_loss()
        predicted_experts_s = self.ways.note(rows, experts_s) if self.ways is not None else 0.0
        # From here on all ranks know the loss, the norm of the gradient, and whether any rank wants to stop.
        grad_norm = float(self.stage.reduce())
        self._row = StepMetrics.agreed(
            step=self.step + 1, loss=optimizer.mean_loss, tokens=(self.step + 1) * self.batch.tokens_per_step, lr=lr,
            grad_norm=grad_norm,
        )  # fmt: skip
        # The weights of this step travel during the next one's forward, with which they are counted.
        account.note_sent()
        self.engine.update()
        if optimizer.has_islands or optimizer.has_own_pace:
            # Messages between islands are sent and awaited at the end of a step.
            account.note_sent()
        self.step += 1
        self._step_start = self._note_start()
        if optimizer.journal is not None:
            optimizer.commit(*self.checkpoints.own_state(self.step), self.checkpoints.about)
        account.end()
        if (line := self.checkpoints.compare_losses(self.step, optimizer.mean_loss)) and self.reporter is not None:
            self.reporter.progress.say(line)
        if teller := self.reporter or self.onlooker:
            teller.step(
                account.metrics(
                    self.step, self.reporter, rows, lr=lr, grad_norm=grad_norm, forward_s=forward_s,
                    experts_s=experts_s, predicted_experts_s=predicted_experts_s, teacher_loss=teacher_loss,
                )
            )  # fmt: skip
        account.count_rows(rows)
        self._change_way()
        self._watch_gradient(grad_norm)
        self._warn_of_saves()
        self.step = self.engine.follow(self.step)
        self._report_changes()

    def _change_way(self) -> None:
        """Let the rows of experts travel as the step's word says."""
        if self.ways is None:
            return
        change = self.ways.follow(self.step)
        self.checkpoints.note_way()
        if change is not None and self.reporter is not None:
            self.reporter.way(change)

    def _watch_gradient(self, norm: float) -> None:
        """Warn of every skipped step. End a run whose gradients stay zero or not finite."""
        if self.reporter is not None and not math.isfinite(norm):
            self.reporter.progress.warn(f"step {self.step} skipped on all ranks: {self.optimizer.skip_reason}")
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

    def _warn_of_saves(self) -> list[str]:
        """Print checkpoints that could not be written, and why; training continues."""
        problems = self.checkpoints.saver.problems()
        for problem in problems:
            if self.reporter is not None:
                self.reporter.progress.warn(f"{problem}; training goes on, and earlier checkpoints are as they were")
        return problems
