"""The machine of a training: its GPUs, the links between them, and the seconds of collectives."""

from dataclasses import dataclass, replace
from math import ceil

from study.errors import Stop
from study.machine.gpus import GPUS, LINKS
from study.predictor.timing.pace import Pace

PCIE_SHARES = {"pcie3": "pcie_share", "pcie4": "pcie_share", "pcie5": "pcie5_share"}


@dataclass(frozen=True)
class Links:
    """The connections of the ranks of a training. `network` is between nodes."""

    ranks: int
    gpus_per_node: int
    link: str
    network: str

    @property
    def nodes(self) -> int:
        return ceil(self.ranks / self.gpus_per_node)

    def within(self, group: int | None) -> "Links":
        """The links within a group of neighbouring ranks."""
        return replace(self, ranks=min(self.ranks, group)) if group else self

    def between(self, group: int) -> "Links":
        """The links between ranks that have the same place in their groups."""
        return replace(self, ranks=self.ranks // group, gpus_per_node=max(1, self.gpus_per_node // group))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs of a training and their links. None: the usual link of such machines."""

    gpu: str
    gpus_per_node: int = 8
    link: str | None = None  # between GPUs of a node
    network: str | None = None  # between nodes
    disk_bytes_per_s: float | None = None  # of a node
    tf32: bool = True  # for products of fp32, if the GPU has it. Our trainer switches it on
    fused_kernels: bool = False  # by torch.compile, Liger or others, instead of transformers' own kernels
    attention_kernel: str | None = "current"  # a name in pace.toml; None: as fast as kernels of 2023
    casts: str | None = None  # of the factors of linear layers, except the head's, to 8 bits: a name in CAST_BYTES
    host_pace: float | None = None  # the host's seconds over kernel_s and module_s. 0: CUDA graphs. None: unknown

    def __post_init__(self):
        if self.host_pace is not None and not 0 <= self.host_pace < 100:
            raise Stop(f"{self.host_pace:g} is no host's pace", "give what make peaks prints, or 0 for CUDA graphs")

    def links(self, ranks: int) -> Links:
        gpu = GPUS[self.gpu]
        return Links(ranks, self.gpus_per_node, self.link or gpu.peer_link, self.network or gpu.network)


def collective_s(kind: str, size_bytes: float, links: Links, constants: Pace) -> float:
    """Seconds of a collective over a tensor of this size, in rings as NCCL builds them.

    A ring goes through every GPU of a node before it leaves the node. There are as many rings as network ports, so all
    ports of a node carry the data. Latencies add up along the ring (NCCL, src/graph/tuning.cc).
    """
    ranks = links.ranks
    if ranks == 1:
        return 0.0
    rounds = 2 if kind == "all_reduce" else 1
    bandwidth = LINKS[links.link].bytes_per_s * getattr(constants, PCIE_SHARES.get(links.link, "link_share"))
    if outer := links.nodes - 1:
        ports = LINKS[links.network].bytes_per_s * min(ranks, links.gpus_per_node)
        bandwidth = min(bandwidth, ports * constants.network_share)
    hop_s = constants.pcie_latency_s if links.link in PCIE_SHARES else constants.link_latency_s
    latency_s = constants.base_latency_s + rounds * ((ranks - 1 - outer) * hop_s + outer * constants.network_latency_s)
    return latency_s + rounds * size_bytes * (ranks - 1) / ranks / bandwidth
