"""The promises of a run, each with the measure that shows it. In the order of the printed table."""

OTHERS = "every setting"  # of what is in no other row
ROWS = {
    "bit-exact resume": "killed at 39 kinds of points, a covering set of runs: all equal to the byte",
    "resume elsewhere": "2 ranks to 1, 3 and 4: the same prompts, losses within 1e-5; changed settings told",
    "preemption": "each signal at each node: one line, exit code 3, then equal to the byte",
    "elastic restart": "a rank killed every 20 steps: 10 of 10 finish with the weights of an uninterrupted run",
    "atomic checkpoints": "every corruption found before a weight is touched, named, fallen back from",
    "retention, asynchronous writing": "steps go on before the disk begins to write; the last good one is never lost",
    "success means success": "15 ways to end early: all end with another code than 0, the culprit named",
    "malformed configs": "100 and more: exit code 2 within 10 s and 1 GB, one line, no model loaded",
    "bad data": "69 kinds: exit code 2, one line with file and row; never a hang or a signal",
    "rewards and environments": "no hang beyond the timeout + 5 s, policy honoured, counted, nothing left over",
    "rank death or stall": "ended within the timeout + 30 s, the rank that was missing named with its node",
    "rank divergence": "refused before step 0, the first difference named",
    "bad steps": "all ranks skip, weights unchanged to the bit, counted; a stop after a set number",
    "engine faults": "one restart with a verified sync, or a clean stop; never a stale weight",
    "silent faults": "32 of 32 mutations caught within one step",
    "leaks": "less than 2 kB a step over 2,000 steps; files, threads, processes constant; nothing left after 20 kills",
    "two runs, one folder": "the second is refused in one line; no folder of others is moved",
    "determinism": "metrics but times equal to the byte at equal ranks; the same prompts on 1, 2 and 4 ranks",
    "safety": "no code of models by itself, no pickle, ports on one interface, 16 secrets, none found; output escaped",
    OTHERS: "what `make test` shows of one algorithm, family, engine or size, for all of them",
}
