//! What a pool can never give.

use crate::good::parsed;
use aviflow_api::check::{NodeKind, PoolFacts, check_pool};

fn pool() -> PoolFacts {
    let kind = |gpu_type: &str, gpus, nodes| NodeKind { gpu_type: gpu_type.into(), gpus, nodes };
    PoolFacts(vec![kind("H100", 8, 4), kind("H200", 8, 2), kind("L4", 4, 10)])
}

/// Each problem as `field: message; help`.
fn check(fields: &str) -> Vec<String> {
    let spec = parsed(&format!("name: a\nrun: x\n{fields}")).spec;
    let said = check_pool(&spec, &pool());
    said.into_iter().map(|d| format!("{}: {}; {}", d.field, d.message, d.help.unwrap_or_default())).collect()
}

#[test]
fn what_fits_is_left_alone() {
    for fields in [
        "",
        "nodes: 4\ngpusPerNode: 8\n",
        "nodes: 10\ngpusPerNode: 4\n",
        "gpuType: [H200, L4]\ngpusPerNode: 8\nnodes: 2\n",
    ] {
        assert_eq!(check(fields), Vec::<String>::new(), "{fields}");
    }
}

#[test]
fn what_can_never_fit_is_told_with_numbers() {
    for (fields, said) in [
        (
            "nodes: 5\ngpusPerNode: 8\n",
            "nodes: the job needs 5 nodes with 8 GPUs each, and there are at most 4 of one type; write `nodes: 4`",
        ),
        (
            "nodes: 20\ngpusPerNode: 1\n",
            "nodes: the job needs 20 nodes with 1 GPU each, and there are at most 10 of one type; write `nodes: 10`; or `gpusPerNode: 8` and `nodes: 3` for at least as many GPUs",
        ),
        (
            "gpusPerNode: 16\nnodes: 2\n",
            "gpusPerNode: no node has 16 GPUs; the most is 8; write `gpusPerNode: 8` and `nodes: 4` for at least as many GPUs",
        ),
        ("gpuType: H10\n", "gpuType: no node has GPUs of type `H10`; write `H100`"),
        ("gpuType: [A10, H100]\n", "gpuType: no node has GPUs of type `A10`; write `H100`, `H200` or `L4`"),
        (
            "gpuType: H200\nnodes: {min: 2, max: 8}\ngpusPerNode: 8\n",
            "nodes: the job would take up to 8 nodes, and there are 2 of type `H200`; write `max: 2`",
        ),
        (
            "gpuType: H200\nnodes: 3\ngpusPerNode: 8\n",
            "nodes: the job needs 3 nodes with 8 GPUs each, and there are 2 of type `H200`; write `nodes: 2`",
        ),
    ] {
        assert_eq!(check(fields), [said], "{fields}");
    }
    let spec = parsed("name: a\nrun: x\n").spec;
    assert_eq!(check_pool(&spec, &PoolFacts::default()).len(), 1);
}
