"""Expert parallelism: a layer's experts are partitioned over ``ep`` neighbours among the ranks of a model's copy.

With dp_shard · cp = 4 and ep = 2, experts 0 to 7 of a layer:

    rank                 0        1        2        3
    holds shards of      0–3      4–7      0–3      4–7       ranks 0 and 2 each have half of experts 0 to 3
    sends tokens to      0, 1     0, 1     2, 3     2, 3

A token's way through a layer: router → sorted by expert → to the rank that holds the expert (one uneven all-to-all) →
that rank's experts, one product of matrices each → back (another) → weighted and added up where it came from.
Attention, routers, norms and shared experts are sharded over all ranks, as without ep.

`partition` partitions experts, `experts` is the operator, `exchange` who gets what. With ep or without:
`recomputation` keeps what routers chose, `routing` counts it for the balance of experts.

A rank's gradients of its experts have the tokens of all ranks that send to it. They add up over the ranks with the
same experts, as all gradients add up over the ranks that shard a parameter.
"""
