import pytest, torch, sys
from functools import partial
from fsdp2kit.parity.reference import errors, plain_loop
from tests.parallel.jobs import Case, run_cases
from tests.reference import TINY, tiny_model_dir, beyond, make_batches, plain_batches
CASES=[Case("qwen3_moe",2,1,2,ep=2),Case("qwen3_moe",1,2,2,ep=2),Case("mixtral",4,1,1,ep=2),Case("qwen3_moe",2,2,1,ep=4,checkpointing="full"),Case("qwen3_moe",2,2,2,ep=2,checkpointing="selective"),
 Case("qwen3_moe",4,1,1,(("strategy","hybrid_shard"),),dp_replicate=2,ep=2,checkpointing="selective"), Case("mixtral",4,1,1,(("reduce_every_micro_batch",False),),ep=4,pack=False)]
@pytest.mark.parametrize("case",CASES,ids=str)
def test_ep(case,pool,tmp_path):
    tiny_model_dir(case.kind,tmp_path)
    batches = make_batches() if case.pack else plain_batches()
    found=pool.run(case.world,run_cases,tmp_path,[case],timeout=600)[0][0]
    plain=plain_loop(tmp_path/case.kind,batches,lr=1e-3,micro_batch_size=4)
    control=errors(plain_loop(tmp_path/case.kind,batches,lr=1e-3,micro_batch_size=1),plain)
    d=errors(found,plain); print(case,d,control)
    assert not beyond(d,control)
