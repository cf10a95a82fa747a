"""Planning: facts of the machine, the memory plan, sizes of graphs, `quire plan`. No torch."""
