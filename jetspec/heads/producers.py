"""The edge producers by name: `head.edges` of a run file."""

from jetspec.heads.config import HeadConfig
from jetspec.heads.edges import EdgeProducer, MarkovEdges, SelectorEdges
from jetspec.heads.lattice import LatticeEdges

EDGES: dict[str, type[EdgeProducer]] = {
    "markov": MarkovEdges,
    "selector": SelectorEdges,
    "lattice": LatticeEdges,
}


def make_edges(config: HeadConfig, hidden_size: int) -> EdgeProducer | None:
    """The producer of `config`, or None where slot scores stand alone."""
    name = config.producer
    return None if name is None else EDGES[name].of(config, hidden_size)
