"""The edge producers by name: `head.edges` of a run file."""

from typing import TYPE_CHECKING

from jetspec.heads.edges import ContextEdges, EdgeProducer, MarkovEdges, SelectorEdges
from jetspec.heads.lattice import LatticeEdges

if TYPE_CHECKING:
    from jetspec.heads.config import HeadConfig

EDGES: dict[str, type[EdgeProducer]] = {
    "markov": MarkovEdges,
    "selector": SelectorEdges,
    "lattice": LatticeEdges,
    "context": ContextEdges,
}


def make_edges(config: "HeadConfig", hidden_size: int, vocab_size: int) -> EdgeProducer | None:
    """The producer of `config`, or None where slot scores stand alone."""
    name = config.producer
    if name is None:
        return None
    edges = EDGES[name].of(config, hidden_size, vocab_size)
    edges.normaliser = config.edge_normaliser
    return edges
