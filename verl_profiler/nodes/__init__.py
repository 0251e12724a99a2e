"""Everything that is done on each node of a cluster over Ray: its clock, and the files of a run."""
