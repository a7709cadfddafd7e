"""The sanitizer: what makes numbers wrong without an error, proven while the program runs.

No rank makes a call in the program's groups for it. Each rank writes facts (hyperparameters,
fingerprints of parameters and gradients, seeds of samplers) into a store, and a thread of global
rank 0 compares them. Races are found in the rank itself.

session.py     what is on, its findings and its end
calls.py       the calls of all groups, as the others see them
races.py       tensors of unfinished works that the program reads or writes
reductions.py  which gradients were reduced, over which ranks, how often
replicas.py    facts about each step of an optimizer, and about samplers
verdicts.py    what the facts of all ranks prove
exchange.py    the store: facts from every rank to rank 0, and the outcome back
"""
