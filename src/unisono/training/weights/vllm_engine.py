"""Weight transfer engines for vLLM, named "unisono": the workers' side and the trainer's.

A worker receives the parts of a checkpoint's tensors that vLLM's own loader reads there, in
addition to the weights that it serves. Before the first vote the loader runs on tensors without
data, to find them, and to see that it can; after the vote it writes in place. All of this happens
within one call of `update_weights`, between two steps of the engine, and `finish_weight_update` has
nothing to do.

If an update fails, the trainer raises and ends vLLM's sessions; a worker only logs it. If workers
raised, vLLM 0.32 would read the replies of an engine's workers up to the first failure, and take
the rest for replies to its next calls.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from unisono.collectives.encoding import torch_dtype
from unisono.collectives.ragged import all_gather_integers, device_of
from unisono.errors import WeightUpdateError
from unisono.training.weights.by_parameter import WeightUpdateGroup
from unisono.training.weights.endpoints import NewTensors, WeightReceiver, WeightSender
from unisono.training.weights.endpoints import WeightUpdate as WeightUpdateResult
from unisono.training.weights.load_plan import LoadPlan
from unisono.training.weights.meeting import end_meeting, init_weight_update_group
from unisono.training.weights.quantized import Form, QuantizedWeights, kinds_of
from unisono.training.weights.shards import WeightShard, held_tensor

_logger = logging.getLogger("unisono")
_GRACE_S = 0.5
"""How long an engine's failure waits for the group's own error."""


@dataclass
class UnisonoInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """A worker's initialisation: where all meet, and the rank of its engine's first worker."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "vllm"
    timeout_s: float | None = None
    join_timeout_s: float | None = None


@dataclass
class UnisonoUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A worker's update: the tensors to receive, as the trainer has them. With an `adapter`, the
    number of a LoRA adapter, and PEFT's `adapter_config` the tensors are that adapter's."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    adapter: int | None = None
    adapter_config: dict[str, Any] | None = None


class UnisonoWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The side of a vLLM worker."""

    init_info_cls = UnisonoInitInfo
    update_info_cls = UnisonoUpdateInfo

    _group: WeightUpdateGroup | None = None
    _receiver: WeightReceiver | None = None
    _adapters: WeightReceiver
    """Its version is that of the adapters: each update is of one of them."""
    _plan: LoadPlan | None = None
    """What vLLM's loader reads for `_planned_for`, a model and the tensors of an update."""
    _planned_for: tuple[object, UnisonoUpdateInfo] | None = None
    _update_info: UnisonoUpdateInfo | None = None
    _in_session = False
    """Whether vLLM has an update in progress: a trainer that dies leaves one."""

    def init_transfer_engine(self, init_info: UnisonoInitInfo) -> None:
        """Meet the trainer and all workers. Leaves an earlier trainer's group."""
        self.shutdown()
        parallel = self.parallel_config
        options = asdict(init_info)
        self._group = init_weight_update_group(
            **options,
            worker_rank=parallel.data_parallel_index * parallel.world_size + parallel.rank,
        )
        _tell_session(self._group, self._in_session)
        parts = _Parts(self._make_plan)
        self._receiver = WeightReceiver(self._group.comm, parts, commit=self._load, reuse=True)
        self._adapters = WeightReceiver(
            self._group.comm, prepare=self._make_adapter, commit=self._place_adapter
        )

    def start_weight_update(self) -> None:
        """There is nothing to do before the tensors arrive."""
        self._in_session, self._update_info = True, None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive, vote and load. vLLM's own method synchronises an accelerator, which a CPU is
        not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UnisonoUpdateInfo) -> None:
        """Take the new version together with all workers of all engines, or keep the old one."""
        if self._receiver is None:
            raise WeightUpdateError("call init_weight_transfer_engine first")
        self._update_info = update_info
        receiver = self._receiver if update_info.adapter is None else self._adapters
        try:
            receiver.update()
        except WeightUpdateError as error:
            _logger.error("%s", error)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def finish_weight_update(self) -> None:
        """Everything is done. A failure here would leave vLLM's session open."""
        self._in_session = False
        if self._update_info is not None and self._update_info.adapter is not None:
            manager = getattr(self.model, "lora_manager", None)
            if (
                manager is not None
            ):  # next, vLLM removes all adapters, as after an update of weights
                kept = partial(vars(manager).pop, "remove_all_adapters")
                manager.remove_all_adapters = kept

    def shutdown(self) -> None:
        """Leave the group."""
        receiver, self._receiver = self._receiver, None
        group, self._group = self._group, None
        if receiver is not None:
            receiver.close()
            self._adapters.close()
        if group is not None:
            group.close()

    def _make_plan(self) -> LoadPlan:
        """What vLLM's loader reads of the tensors of this update, found on parameters without
        memory: it raises for names and shapes that the model does not have."""
        info = self._update_info
        assert info is not None
        if self._plan is not None and self._planned_for == (self.model, info):
            return self._plan
        self._plan = None
        for module in self.model.modules():
            kernel = getattr(getattr(module, "scheme", None), "kernel", None)
            if hasattr(kernel, "dnnl_handler"):
                raise WeightUpdateError(
                    "vLLM's oneDNN kernel computes nonsense once int8 weights are loaded anew, "
                    "also by vLLM's own reload_weights: they need a CPU with AMX"
                )
        checkpoint = {
            name: torch.empty(shape, dtype=torch_dtype(dtype_name), device="meta")
            for name, dtype_name, shape in zip(
                info.names, info.dtype_names, info.shapes, strict=True
            )
        }
        level = logging.getLogger("vllm").level
        initialize_layerwise_reload(self.model)
        try:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                loader = getattr(tensor, "weight_loader", default_weight_loader)
                if loader.__name__ == "online_process_loader":  # it would start to load
                    tensor.weight_loader = loader.__wrapped__
            plan = LoadPlan(self._run_loader, checkpoint, device=self.device)
        finally:
            logging.getLogger("vllm").setLevel(logging.ERROR)  # "failed to load weights"
            try:
                finalize_layerwise_reload(self.model, self.model_config)
            finally:
                logging.getLogger("vllm").setLevel(level)
        if plan.whole:
            _logger.warning(
                "unisono: vLLM's loader looks at values, so this worker receives whole tensors"
            )
        self._plan, self._planned_for = plan, (self.model, info)
        return plan

    def _run_loader(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        with disable_mtp_completeness_check():
            self.model.load_weights(pairs)

    def _load(self, parts: NewTensors) -> None:
        assert self._plan is not None
        try:
            initialize_layerwise_reload(self.model)
            self._plan.replay(parts)
            finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:  # the others serve the new version, and this one has parts of two
            self._end_service()

    def _make_adapter(self, tensors: NewTensors) -> None:
        """vLLM's form of a LoRA adapter. Raises what vLLM does, and if this engine has no slots."""
        info, manager = self._update_info, getattr(self.model, "lora_manager", None)
        assert info is not None
        if manager is None:
            raise WeightUpdateError("this engine has no slots for adapters: start it with LoRA")
        config = PEFTHelper.from_dict(info.adapter_config)
        config.validate_legal(manager.lora_config)
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        self._adapter = LoRAModel.from_lora_tensors(
            info.adapter,
            tensors,
            config,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=mapper and mapper.get_rename_mapper(),
            skip_prefixes=getattr(self.model, "lora_skip_prefixes", None),
        )
        parts = {part for parts in manager.packed_modules.values() for part in parts}
        unknown = self._adapter.loras.keys() - manager.modules.keys() - parts
        if unknown:
            raise WeightUpdateError(f"this engine has no modules {', '.join(sorted(unknown))}")

    def _place_adapter(self, _: NewTensors) -> None:
        manager = self.model.lora_manager
        try:
            manager.remove_adapter(self._adapter.id)
            if len(manager) == manager.capacity:
                manager.remove_oldest_adapter()
            manager.add_adapter(self._adapter)
            manager.activate_adapter(self._adapter.id)
        except BaseException:
            self._end_service()

    @staticmethod
    def _end_service() -> None:
        """End this process, which vLLM notices: nothing else stops captured graphs."""
        _logger.critical(
            "vLLM could not load weights that all engines have agreed on, and holds parts of two "
            "versions: this worker exits instead of serving them",
            exc_info=True,
        )
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)


class _Parts:
    """What a worker receives: a plan is made when it is asked for, and fails there."""

    def __init__(self, plan: Callable[[], LoadPlan]) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[tuple[str, list[WeightShard]]]:
        yield from self._plan().weights.items()


# -- the trainer -----------------------------------------------------------------------------------


@dataclass
class UnisonoTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Where the trainer and all workers meet: rank 0 hosts a store there. `world_size` counts the
    sending trainer and the workers of all engines, `engine_sizes` the workers of each one if they
    differ. `timeout_s` is how long each step of an update waits for the others. With `senders`
    the first so many trainer ranks send what each of them holds, and `world_size` counts them all;
    `group_name` tells meetings at one port apart."""

    backend: ClassVar[str] = "unisono"

    master_address: str
    master_port: int
    world_size: int
    engine_sizes: Sequence[int] | None = None
    timeout_s: float | None = None
    join_timeout_s: float | None = None
    senders: int = 1
    group_name: str | None = None


class ShardSource(ModuleSource):  # type: ignore[misc]
    """A source that yields this rank's parameters as they are, DTensors too: nothing is gathered.
    With `form`, `names` and `group`, those of `QuantizedWeights`, it yields them quantised."""

    def __init__(
        self,
        module: torch.nn.Module,
        form: Form | None = None,
        names: Callable[[str], bool] = bool,
        *,
        group: Any = None,
    ) -> None:
        super().__init__(module)
        self._form, self._names, self._group = form, names, group

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        weights = dict(self._module.named_parameters())
        if self._form is None:
            yield from weights.items()
        else:
            yield from QuantizedWeights(weights, self._form, self._names, group=self._group)

    def metadata(self) -> list[ParamMeta]:
        """Of the whole model, known without the other ranks."""
        found = []
        for each in super().metadata():
            if self._form is not None and self._names(each.name):
                found += kinds_of(each.name, tuple(each.shape), self._form)
            else:
                found.append((each.name, each.dtype, tuple(each.shape)))
        return [ParamMeta(*each) for each in found]


class UnisonoTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's side. `client` is a vLLM client, an `LLM` of this process, or a list of them,
    one for each engine, which are all called at the same time."""

    init_info_cls = UnisonoTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, is_sender: bool = True) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        given = client if isinstance(client, (list, tuple)) else [client]
        self._clients = [
            _InProcess(each) if hasattr(each, "llm_engine") else each for each in given
        ]
        self._threads = ThreadPoolExecutor(len(self._clients) + 1, "unisono engines")
        self._weights: dict[str, torch.Tensor] = {}
        self._group: WeightUpdateGroup | None = None

    @classmethod
    def trainer_init(
        cls, init_info: UnisonoTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Meet all workers of all engines. Every trainer rank calls it; rank 0 connects."""
        if source is None:
            raise ValueError("the trainer needs a WeightSource, which provides what to send")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            engine._meet(init_info)
        elif init_info.rank < init_info.senders:
            engine._group, _ = _meet_workers(_place_of(init_info), init_info.rank)
            engine._make_sender(init_info)
        return engine

    def _meet(self, info: UnisonoTrainerInitInfo) -> None:
        count, workers = len(self._clients), info.world_size - info.senders
        sizes = info.engine_sizes or [workers // count] * count
        if len(sizes) != count or sum(sizes) != workers:
            raise ValueError(
                f"engines of {list(sizes)} workers are not {count} engines of {workers} workers: "
                "world_size counts the sending trainers and the workers of all engines"
            )
        where = _place_of(info)
        offsets = list(accumulate(sizes, initial=info.senders))[:-1]
        told = [
            self._threads.submit(each.init_weight_transfer_engine, where | {"rank_offset": offset})
            for each, offset in zip(self._clients, offsets, strict=True)
        ]
        meeting = self._threads.submit(_meet_workers, where, 0)
        under_way: list[Future[Any]] = [meeting, *told]
        wait(under_way, return_when=FIRST_EXCEPTION)
        for future in told:
            if future.done() and future.exception() is not None and not meeting.done():
                why = f"an engine was not initialised: {future.exception()}"
                end_meeting(info.master_address, info.master_port, where["group_name"], why)
        self._group, are_open = meeting.result()
        for future in told:
            future.result()
        self._make_sender(info)
        for each, offset in zip(self._clients, offsets, strict=True):
            if are_open[offset]:  # an earlier trainer died in the middle
                each.finish_weight_update()

    def _make_sender(self, info: UnisonoTrainerInitInfo) -> None:
        assert self._group is not None
        self._senders = info.senders
        self._sender = WeightSender(self._group.comm, self._weights)
        self._adapter: dict[str, torch.Tensor] = {}
        self._adapters = WeightSender(self._group.comm, self._adapter)

    def send_weights(self, version: int | None = None) -> WeightUpdateResult | None:
        """Send what the source has now, as `version`, by default the next one. Every trainer rank
        calls it, because the source may gather. Afterwards every engine serves it.

        Raises WeightUpdateError if a worker failed, died or timed out, and what a client raises:
        every engine keeps its old weights, unless the error is `committed`. If it is `group_ended`,
        shut this engine down and call `trainer_init` with the remaining ones.
        """
        if self._group is None:
            for _ in self.source:  # gathering needs all trainer ranks
                pass
            if not self.is_sender:
                return None
            raise WeightUpdateError("the trainer has left its engines: call trainer_init first")
        self._weights.update(self.source)
        try:
            if not self.is_sender:
                return self._sender.update(version)
            update = self._drive(self._sender, self._info(), version)
        finally:
            self._weights.clear()
        wait(calls := self._begin("finish_weight_update", str(update.version)))
        for call in calls:
            call.result()
        return update

    def send_adapter(
        self, number: int, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> WeightUpdateResult:
        """Send a LoRA adapter to a slot of every engine, or of none; base weights stay. Requests
        name it with `number` as `lora_int_id`. Names and `config` are those of PEFT's files. Every
        sending trainer calls it, with what it holds. Raises what `send_weights` does."""
        if self._group is None:
            raise WeightUpdateError("adapters are sent by trainers that have met the engines")
        try:
            self._adapter.update(tensors)
            if not self.is_sender:
                return self._adapters.update()
            info = _describe(self._adapter, adapter=number, adapter_config=dict(config))
            update = self._drive(self._adapters, info, None)
        finally:
            self._adapter.clear()
        wait(calls := self._begin("finish_weight_update"))
        for call in calls:
            call.result()
        return update

    def _info(self) -> UnisonoUpdateInfo:
        if self._senders == 1:
            return _describe(self._weights)
        kinds = list(self.source.metadata())
        return UnisonoUpdateInfo(
            names=[each.name for each in kinds],
            dtype_names=[str(each.dtype).removeprefix("torch.") for each in kinds],
            shapes=[list(each.shape) for each in kinds],
        )

    def _drive(
        self, sender: WeightSender, info: UnisonoUpdateInfo, version: int | None
    ) -> WeightUpdateResult:
        sending: Future[Any] | None = None
        wait(calls := self._begin("start_weight_update"))
        try:
            for call in calls:
                call.result()
            sending = self._threads.submit(sender.update, version)
            calls = self._begin("update_weights", asdict(info))
            wait([sending, *calls], return_when=FIRST_EXCEPTION)
            failed = [call.exception() for call in calls if call.done() and call.exception()]
            if failed and not wait([sending], _GRACE_S).done:  # that engine will never join
                self._abort(f"an engine rejected the update: {failed[0]}")
            update: WeightUpdateResult = sending.result()
            for call in calls:
                call.result()
        except BaseException as error:
            if self._senders > 1 if sending is None else not sending.done():  # others wait
                self._abort(f"the trainer was interrupted: {error!r}")
            self._end_sessions(calls)
            raise
        return update

    def _abort(self, reason: str) -> None:
        if self._group is not None:
            self._group.comm.abort(reason)

    def shutdown(self) -> None:
        """Leave the engines and release the port."""
        group, self._group = self._group, None
        if group is not None:
            self._sender.close()
            self._adapters.close()
            group.close()
        self._threads.shutdown(wait=False)

    # -- all engines at a time ---------------------------------------------------------------------

    def _begin(self, method: str, *arguments: Any) -> list[Future[None]]:
        return [self._threads.submit(getattr(each, method), *arguments) for each in self._clients]

    def _end_sessions(self, calls: Sequence[Future[None]]) -> None:
        """After a failure, end the sessions of engines that answered properly; others are not
        waited for. An LLM of this process must not be called by two threads at a time."""
        wait(calls, _GRACE_S)
        ends = [
            self._threads.submit(each.finish_weight_update)
            for each, call in zip(self._clients, calls, strict=True)
            if call.done() and call.exception() is None
        ]
        wait(ends, _GRACE_S)


def _describe(weights: Mapping[str, Any], **adapter: Any) -> UnisonoUpdateInfo:
    held = {name: held_tensor(name, value) for name, value in weights.items()}
    return UnisonoUpdateInfo(
        names=list(held),
        dtype_names=[str(each.tensor.dtype).removeprefix("torch.") for each in held.values()],
        shapes=[list(each.whole) for each in held.values()],
        **adapter,
    )


def _place_of(info: UnisonoTrainerInitInfo) -> dict[str, Any]:
    """Where all meet; a single trainer makes up a name."""
    made_up = uuid.uuid4().hex if info.senders == 1 else "trainers"
    return {
        "master_address": info.master_address,
        "master_port": info.master_port,
        "world_size": info.world_size,
        "group_name": f"vllm {info.group_name or made_up}",
        "timeout_s": info.timeout_s,
        "join_timeout_s": info.join_timeout_s,
    }


def _meet_workers(where: dict[str, Any], rank: int) -> tuple[WeightUpdateGroup, list[bool]]:
    """The group, and whether each rank has an open vLLM session."""
    group = init_weight_update_group(**where, rank_offset=rank)
    return group, _tell_session(group, False)


def _tell_session(group: WeightUpdateGroup, is_open: bool) -> list[bool]:
    """Whether each rank has an open vLLM session."""
    numbers = all_gather_integers(group.comm, (int(is_open),), device_of(group.comm))
    return [bool(row[0]) for row in numbers]


class _InProcess:
    """A client for an `LLM` of this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)
