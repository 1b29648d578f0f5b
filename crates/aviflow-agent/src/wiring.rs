//! The variables that tie a rank to its gang. Pure.
//!
//! Invariants: no rank of a gang of several nodes sees `localhost` unless the
//! control plane gave it; the rendezvous is static, as under c10d a node's rank
//! differs from its index; the rendezvous id and the port are of one epoch;
//! `RANK` and its kin exist only where the platform itself starts one process
//! for each GPU, because torchrun and accelerate set them for theirs.
//!
//! What is known to go wrong, and the test that sees it. Those of `frameworks` run PyTorch and JAX themselves, and those
//! of `training` are in the same folder, `crates/aviflow/tests`.
//!
//! | trap | tests |
//! |---|---|
//! | a bare `torchrun train.py` knows nothing of its gang | `a_node_s_process_is_wired_for_torchrun`; `frameworks`: `torch_ddp_…`, `torch_fsdp2_…` |
//! | without a launcher, `RANK` and its kin are missing | `a_gpu_s_process_knows_its_rank`; `frameworks`: `torch_needs_no_launcher_…` |
//! | with one, they mislead its processes | `a_node_s_process_is_wired_for_torchrun`; `process::environment`'s own |
//! | JAX reads the coordinator's address alone, and not how many processes there are | `an_ipv6_coordinator_has_brackets`; `python/aviflow/tests/test_jax.py`; `frameworks`: `jax_finds_…` |
//! | a job overrides what ties it together | `all_that_is_set_is_reserved`; `training`: `processes_of_nodes_find_each_other_and_no_other_job` |
//! | a rank of another node sees `localhost`, or a name that rank 0 does not know for its own, or that DNS does not know yet | `a_gang_of_several_nodes_is_told_one_address`; `training`: the same; `frameworks`: each asserts an address |
//! | under c10d a node's rank is not its index | `a_node_s_process_is_wired_for_torchrun`; `frameworks`: each asserts ranks by nodes |
//! | two jobs on a node meet at one port, or an attempt meets the one before | `no_two_epochs_meet`; `training`: `jobs_of_two_control_planes_meet_at_different_ports` |
//! | torchrun flattens exit codes | `each_epoch_of_a_rank_has_an_error_file_of_its_own`; `process`: `torchrun_s_error_files_are_read`; `frameworks`: `torch_says_why_…` |
//! | 64 MB of `/dev/shm` break data loaders | `aviflow_kube::pod`: `data_loaders_have_the_memory_of_the_node` |
//! | Gloo takes no list of interfaces with `^` | `interfaces_are_not_chosen_here` |

use crate::protocol::{WorkerSpec, files};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The variables that a job may not set: the wiring wins.
///
/// The document's check refuses them; the agent overrides them besides.
pub const RESERVED: &[&str] = &[
    "AVIFLOW_ATTEMPT",
    "AVIFLOW_BEST_STEP",
    "AVIFLOW_EPOCH",
    "AVIFLOW_JOB",
    "AVIFLOW_LOCK_FD",
    "AVIFLOW_NODE",
    "AVIFLOW_RANK",
    "AVIFLOW_SLOT",
    "AVIFLOW_SOCKET",
    "AVIFLOW_TERMINALS",
    "AVIFLOW_WORKER",
    "AVIFLOW_WORKER_MARK",
    "CUDA_VISIBLE_DEVICES",
    "GROUP_RANK",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NNODES",
    "NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_NPROC_PER_NODE",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_ID",
    "PET_STANDALONE",
    "RANK",
    "TORCHELASTIC_ERROR_FILE",
    "WORLD_SIZE",
];

/// Variables that ranks get where neither the job nor its image says otherwise.
///
/// Slots count GPUs as `nvidia-smi` does, by their place on the bus. CUDA counts the fastest first unless it is told,
/// and then a slot is another GPU to a rank than to who gave it the slot.
pub const DEFAULTS: [(&str, &str); 1] = [("CUDA_DEVICE_ORDER", "PCI_BUS_ID")];

/// What an epoch adds to the spec of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The epoch.
    pub epoch: u32,
    /// Address of rank 0.
    pub master_host: String,
    /// Its port.
    pub master_port: u16,
    /// The highest step of all earlier attempts.
    pub best_step: Option<u64>,
}

/// The file in which torchrun leaves the error of a rank, whose exit code it flattens to 1.
#[must_use]
pub fn error_file(folder: &Path, epoch: u32, rank: u32) -> PathBuf {
    folder.join(format!("error.{epoch}.{rank}.json"))
}

/// The wiring of one rank (of the gang) of this worker.
///
/// `folder` is the worker's, `socket` that of the hooks.
#[must_use]
pub fn variables(
    spec: &WorkerSpec,
    launch: &Launch,
    rank: u32,
    folder: &Path,
    socket: &Path,
) -> BTreeMap<&'static str, String> {
    let mut wiring = BTreeMap::new();
    let mut set = |name: &'static str, value: String| {
        wiring.insert(name, value);
    };
    let local = rank.saturating_sub(spec.first_rank);

    set("AVIFLOW_JOB", spec.job.clone());
    set("AVIFLOW_ATTEMPT", spec.attempt.to_string());
    set("AVIFLOW_EPOCH", launch.epoch.to_string());
    set("AVIFLOW_WORKER", spec.worker.to_string());
    set("AVIFLOW_NODE", spec.node.clone());
    set("AVIFLOW_RANK", rank.to_string());
    set("AVIFLOW_SOCKET", socket.to_string_lossy().into_owned());
    set("AVIFLOW_TERMINALS", folder.join(files::TERMINALS).to_string_lossy().into_owned());
    if let Some(step) = launch.best_step {
        set("AVIFLOW_BEST_STEP", step.to_string());
    }
    set("TORCHELASTIC_ERROR_FILE", error_file(folder, launch.epoch, rank).to_string_lossy().into_owned());

    set("MASTER_ADDR", launch.master_host.clone());
    set("MASTER_PORT", launch.master_port.to_string());
    set("NNODES", spec.workers.to_string());
    set("NODE_RANK", spec.worker.to_string());
    set("GROUP_RANK", spec.worker.to_string());

    set("PET_NNODES", spec.workers.to_string());
    set("PET_NPROC_PER_NODE", spec.gpus_per_node.max(1).to_string());
    set("PET_NODE_RANK", spec.worker.to_string());
    set("PET_MASTER_ADDR", launch.master_host.clone());
    set("PET_MASTER_PORT", launch.master_port.to_string());
    set("PET_RDZV_BACKEND", "static".to_owned());
    set("PET_RDZV_ID", format!("aviflow-{}-{}-{}", spec.job_id, spec.attempt, launch.epoch));

    let host = &launch.master_host;
    // An IPv6 address needs brackets before a port.
    let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.clone() };
    set("JAX_COORDINATOR_ADDRESS", format!("{host}:{}", launch.master_port));
    if spec.per_gpu {
        set("RANK", rank.to_string());
        set("LOCAL_RANK", local.to_string());
        set("WORLD_SIZE", spec.world_size.to_string());
        set("LOCAL_WORLD_SIZE", spec.ranks.to_string());
        set("JAX_NUM_PROCESSES", spec.world_size.to_string());
        set("JAX_PROCESS_ID", rank.to_string());
        if let Some(slot) = spec.slots.get(local as usize) {
            set("AVIFLOW_SLOT", slot.to_string());
        }
        if spec.gpus_per_node > 0 {
            set("JAX_LOCAL_DEVICE_IDS", local.to_string());
        }
    } else {
        set("JAX_NUM_PROCESSES", spec.workers.to_string());
        set("JAX_PROCESS_ID", spec.worker.to_string());
    }

    // Every process sees all GPUs of its worker, as scripts use `cuda:LOCAL_RANK`.
    // A job without GPUs must not touch anybody's. With GPUs and without slots,
    // the container has been given its devices already.
    if spec.gpus_per_node == 0 || !spec.slots.is_empty() {
        let slots: Vec<String> = spec.slots.iter().map(u32::to_string).collect();
        set("CUDA_VISIBLE_DEVICES", slots.join(","));
    }
    wiring
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::protocol::Endpoint;

    pub(crate) fn spec() -> WorkerSpec {
        WorkerSpec {
            job_id: 12,
            job: "default/llama".into(),
            attempt: 3,
            worker: 1,
            workers: 2,
            node: "n7".into(),
            token: "secret".into(),
            control: Endpoint::Unix("/run/control.sock".into()),
            authority: None,
            host: "10.0.0.2".into(),
            run: vec!["torchrun".into(), "train.py".into()],
            cwd: "/".into(),
            env: BTreeMap::new(),
            ranks: 1,
            first_rank: 1,
            world_size: 2,
            per_gpu: false,
            gpus_per_node: 4,
            slots: vec![4, 5, 6, 7],
            grace_ms: 30_000,
            log_buffer: 1 << 20,
            facts: BTreeMap::new(),
            token_file: None,
            inherit: false,
            prepend: BTreeMap::new(),
            fence_after_ms: None,
        }
    }

    fn launch() -> Launch {
        Launch { epoch: 2, master_host: "10.0.0.1".into(), master_port: 20_017, best_step: Some(400) }
    }

    fn wired(spec: &WorkerSpec, rank: u32) -> BTreeMap<&'static str, String> {
        variables(spec, &launch(), rank, Path::new("/w"), Path::new("/w/hooks.sock"))
    }

    fn check(wiring: &BTreeMap<&'static str, String>, expected: &[(&str, Option<&str>)]) {
        for (name, value) in expected {
            assert_eq!(wiring.get(name).map(String::as_str), *value, "{name}");
        }
    }

    #[test]
    fn a_node_s_process_is_wired_for_torchrun() {
        check(
            &wired(&spec(), 1),
            &[
                ("PET_NNODES", Some("2")),
                ("PET_NPROC_PER_NODE", Some("4")),
                ("PET_NODE_RANK", Some("1")),
                ("PET_MASTER_ADDR", Some("10.0.0.1")),
                ("PET_MASTER_PORT", Some("20017")),
                ("PET_RDZV_BACKEND", Some("static")),
                ("PET_RDZV_ID", Some("aviflow-12-3-2")),
                ("MASTER_ADDR", Some("10.0.0.1")),
                ("NODE_RANK", Some("1")),
                ("NNODES", Some("2")),
                ("JAX_COORDINATOR_ADDRESS", Some("10.0.0.1:20017")),
                ("JAX_NUM_PROCESSES", Some("2")),
                ("JAX_PROCESS_ID", Some("1")),
                ("CUDA_VISIBLE_DEVICES", Some("4,5,6,7")),
                ("AVIFLOW_BEST_STEP", Some("400")),
                ("TORCHELASTIC_ERROR_FILE", Some("/w/error.2.1.json")),
                ("RANK", None),
                ("LOCAL_RANK", None),
                ("WORLD_SIZE", None),
                ("LOCAL_WORLD_SIZE", None),
                ("AVIFLOW_SLOT", None),
            ],
        );
    }

    #[test]
    fn a_gpu_s_process_knows_its_rank() {
        let spec = WorkerSpec { per_gpu: true, ranks: 4, first_rank: 4, world_size: 8, ..spec() };
        check(
            &wired(&spec, 6),
            &[
                ("RANK", Some("6")),
                ("LOCAL_RANK", Some("2")),
                ("WORLD_SIZE", Some("8")),
                ("LOCAL_WORLD_SIZE", Some("4")),
                ("AVIFLOW_SLOT", Some("6")),
                ("AVIFLOW_RANK", Some("6")),
                ("JAX_NUM_PROCESSES", Some("8")),
                ("JAX_PROCESS_ID", Some("6")),
                ("JAX_LOCAL_DEVICE_IDS", Some("2")),
                ("CUDA_VISIBLE_DEVICES", Some("4,5,6,7")),
                ("GROUP_RANK", Some("1")),
            ],
        );
    }

    #[test]
    fn a_job_without_gpus_sees_none() {
        let spec = WorkerSpec { gpus_per_node: 0, slots: vec![], ..spec() };
        check(&wired(&spec, 1), &[("CUDA_VISIBLE_DEVICES", Some("")), ("PET_NPROC_PER_NODE", Some("1"))]);
        let given = WorkerSpec { slots: vec![], ..self::spec() };
        check(&wired(&given, 1), &[("CUDA_VISIBLE_DEVICES", None)]);
    }

    #[test]
    fn an_ipv6_coordinator_has_brackets() {
        let launch = Launch { master_host: "fd00::1".into(), ..launch() };
        let wiring = variables(&spec(), &launch, 1, Path::new("/w"), Path::new("/w/s"));
        check(&wiring, &[("JAX_COORDINATOR_ADDRESS", Some("[fd00::1]:20017")), ("MASTER_ADDR", Some("fd00::1"))]);
    }

    #[test]
    fn a_gang_of_several_nodes_is_told_one_address() {
        let per_gpu = WorkerSpec { per_gpu: true, ranks: 4, first_rank: 4, world_size: 8, ..spec() };
        for spec in [spec(), per_gpu] {
            let wiring = wired(&spec, spec.first_rank);
            // Not the worker's own, and no name: neither is the same on every node.
            check(&wiring, &[("MASTER_ADDR", Some("10.0.0.1")), ("PET_MASTER_ADDR", Some("10.0.0.1"))]);
            for (name, value) in &wiring {
                assert!(!value.contains("localhost") && !value.contains(&spec.host), "{name}={value}");
            }
            // torchrun would take the host of an endpoint before the address.
            check(&wiring, &[("PET_RDZV_ENDPOINT", None), ("PET_STANDALONE", None)]);
        }
    }

    #[test]
    fn no_two_epochs_meet() {
        let id = |job_id: u64, attempt: u32, epoch: u32| {
            let spec = WorkerSpec { job_id, attempt, ..spec() };
            variables(&spec, &Launch { epoch, ..launch() }, 1, Path::new("/w"), Path::new("/w/s"))["PET_RDZV_ID"]
                .clone()
        };
        let ids: std::collections::BTreeSet<String> =
            [(1, 1, 1), (1, 1, 2), (1, 2, 1), (11, 1, 1), (1, 11, 1)].map(|(j, a, e)| id(j, a, e)).into();
        assert_eq!(ids.len(), 5, "{ids:?}");
        let other = Launch { master_port: 20_018, ..launch() };
        let wiring = variables(&spec(), &other, 1, Path::new("/w"), Path::new("/w/s"));
        for name in ["MASTER_PORT", "PET_MASTER_PORT"] {
            check(&wiring, &[(name, Some("20018"))]);
        }
    }

    #[test]
    fn each_epoch_of_a_rank_has_an_error_file_of_its_own() {
        let files: std::collections::BTreeSet<PathBuf> =
            [(1, 0), (2, 0), (1, 1), (11, 0), (1, 10)].map(|(e, r)| error_file(Path::new("/w"), e, r)).into();
        assert_eq!(files.len(), 5, "{files:?}");
    }

    #[test]
    fn interfaces_are_not_chosen_here() {
        // A pool's fabric says `NCCL_SOCKET_IFNAME=^lo`, which Gloo under its own name takes for an interface.
        for name in wired(&spec(), 1).keys().copied().chain(RESERVED.iter().copied()) {
            assert!(!name.ends_with("_SOCKET_IFNAME"), "{name}");
        }
    }

    #[test]
    fn all_that_is_set_is_reserved() {
        let spec = WorkerSpec { per_gpu: true, ..spec() };
        for name in wired(&spec, 1).keys() {
            assert!(RESERVED.contains(name), "{name}");
        }
        assert!(RESERVED.is_sorted());
    }
}
