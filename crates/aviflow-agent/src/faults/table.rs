//! What programs print when they fail, and what it means.
//!
//! The texts are those of PyTorch (`c10/cuda/CUDAException.cpp`, `torch/csrc/distributed/c10d`), CUDA's
//! `cudaGetErrorString`, NCCL's `ncclGetErrorString`, Gloo (`transport/tcp/pair.cc`), JAX, Python's errno messages,
//! huggingface_hub, Megatron-LM and DeepSpeed. Compared in lower case; the first that a line holds counts, so that
//! those that say more stand first.

use super::Class::{self, *};
use super::Whose::{self, Application, Node};

/// The text, what it is, whose, and whether it may be the effect of another rank's end.
type Row = (&'static str, Class, Option<Whose>, bool);

const TABLE: &[Row] = &[
    // Memory of GPUs.
    ("cuda out of memory", GpuOutOfMemory, Some(Application), false),
    ("hip out of memory", GpuOutOfMemory, Some(Application), false),
    ("cuda error: out of memory", GpuOutOfMemory, Some(Application), false),
    ("resource_exhausted: out of memory", GpuOutOfMemory, Some(Application), false),
    ("outofmemoryerror", GpuOutOfMemory, Some(Application), false),
    ("cublas_status_alloc_failed", GpuOutOfMemory, Some(Application), false),
    // GPUs that are broken.
    ("uncorrectable ecc error", GpuHardware, Some(Node), false),
    ("uncorrectable nvlink error", GpuHardware, Some(Node), false),
    ("invalid access of peer gpu memory over nvlink", GpuHardware, Some(Node), false),
    ("gpu is lost", GpuHardware, Some(Node), false),
    ("fallen off the bus", GpuHardware, Some(Node), false),
    ("system not yet initialized", GpuHardware, Some(Node), false),
    ("no cuda-capable device is detected", GpuHardware, Some(Node), false),
    ("cuda-capable device(s) is/are busy or unavailable", GpuHardware, Some(Node), false),
    ("hardware stack error", GpuHardware, Some(Node), false),
    // Kernels.
    ("device-side assert triggered", GpuAssert, Some(Application), false),
    ("an illegal memory access was encountered", GpuError, None, false),
    ("unspecified launch failure", GpuError, None, false),
    ("an illegal instruction was encountered", GpuError, None, false),
    ("misaligned address", GpuError, Some(Application), false),
    ("no kernel image is available", GpuError, Some(Application), false),
    ("invalid device ordinal", GpuError, Some(Application), false),
    ("the launch timed out and was terminated", GpuError, None, false),
    ("cuda driver version is insufficient", GpuError, None, false),
    ("no cuda gpus are available", GpuError, None, false),
    ("cublas_status_execution_failed", GpuError, None, false),
    ("cudnn_status_execution_failed", GpuError, None, false),
    ("acceleratorerror: cuda error", GpuError, None, false),
    ("runtimeerror: cuda error", GpuError, None, false),
    // Collective operations.
    ("duplicate gpu detected", CollectiveError, Some(Application), false),
    ("watchdog caught collective operation timeout", CollectiveTimeout, None, true),
    ("some nccl operations have failed or timed out", CollectiveTimeout, None, true),
    ("watchdog got stuck", CollectiveTimeout, None, true),
    ("ms for recv operation to complete", CollectiveTimeout, None, true),
    ("ms for send operation to complete", CollectiveTimeout, None, true),
    ("timed out after waiting for", CollectiveTimeout, None, true),
    ("ncclremoteerror", PeerGone, None, true),
    ("remote process exited or there was a network error", PeerGone, None, true),
    ("a remote process exiting prematurely", PeerGone, None, true),
    ("connection closed by peer", PeerGone, None, true),
    ("connection reset by peer", PeerGone, None, true),
    ("connectfullmesh failed", PeerGone, None, true),
    ("socket closed by remote peer", PeerGone, None, true),
    ("net/ib : got completion", FabricError, None, true),
    ("net/ib: got completion", FabricError, None, true),
    ("ib verbs error", FabricError, None, true),
    ("async fatal event on qp", FabricError, Some(Node), false),
    ("ncclinvalidusage", CollectiveError, Some(Application), false),
    ("ncclunhandledcudaerror", CollectiveError, None, true),
    ("unhandled cuda error", CollectiveError, None, true),
    ("ncclsystemerror", CollectiveError, None, true),
    ("unhandled system error", CollectiveError, None, true),
    ("ncclinternalerror", CollectiveError, None, true),
    ("nccl communicator was aborted", CollectiveError, None, true),
    ("nccl error", CollectiveError, None, true),
    // The stores and services by which ranks find each other.
    ("the client socket has failed to connect", PeerGone, None, true),
    ("the client socket has timed out", PeerGone, None, true),
    ("clients joined", PeerGone, None, true),
    ("failed to recv, got 0 bytes", PeerGone, None, true),
    ("failed to check the \"should dump\" flag on tcpstore", PeerGone, None, true),
    ("rendezvousconnectionerror", PeerGone, None, true),
    ("jax distributed service detected fatal errors", PeerGone, None, true),
    ("tasks are unhealthy", PeerGone, None, true),
    ("coordination service agent", PeerGone, None, true),
    ("broken pipe", PeerGone, None, true),
    // torchrun's own word about what it did.
    ("got signal: 15", Stopped, None, true),
    ("keyboardinterrupt", Stopped, None, true),
    // Memory of hosts. A loader's worker that is killed is one for whom there was none.
    ("is killed by signal: killed", HostOutOfMemory, Some(Application), false),
    ("defaultcpuallocator: can't allocate memory", HostOutOfMemory, Some(Application), false),
    ("defaultcpuallocator: not enough memory", HostOutOfMemory, Some(Application), false),
    ("std::bad_alloc", HostOutOfMemory, Some(Application), false),
    ("memoryerror", HostOutOfMemory, Some(Application), false),
    ("cannot allocate memory", HostOutOfMemory, Some(Application), false),
    // Shared memory, before disks: its message is theirs.
    ("insufficient shared memory", SharedMemoryFull, Some(Application), false),
    ("unable to write to file </torch_", SharedMemoryFull, Some(Application), false),
    ("unable to mmap", SharedMemoryFull, Some(Application), false),
    ("error while creating shared memory segment", SharedMemoryFull, Some(Application), false),
    ("is killed by signal: bus error", SharedMemoryFull, Some(Application), false),
    ("no space left on device", DiskFull, None, false),
    ("disk quota exceeded", DiskFull, Some(Application), false),
    ("pytorchstreamwriter failed writing", DiskFull, None, false),
    // Numbers.
    ("found nan in", NotANumber, Some(Application), false),
    ("found inf in", NotANumber, Some(Application), false),
    ("loss is nan", NotANumber, Some(Application), false),
    ("loss is not finite", NotANumber, Some(Application), false),
    ("nan detected", NotANumber, Some(Application), false),
    ("nan loss", NotANumber, Some(Application), false),
    ("nan or inf found", NotANumber, Some(Application), false),
    ("returned nan values in its", NotANumber, Some(Application), false),
    ("is non-finite, so it cannot be clipped", NotANumber, Some(Application), false),
    ("loss scale already at minimum", NotANumber, Some(Application), false),
    // Files that are damaged.
    ("pytorchstreamreader failed", DamagedCheckpoint, None, false),
    ("failed finding central directory", DamagedCheckpoint, None, false),
    ("error while deserializing header", DamagedCheckpoint, None, false),
    ("unpicklingerror", DamagedCheckpoint, None, false),
    // Programs that do not fit.
    ("modulenotfounderror", ImportFailed, Some(Application), false),
    ("importerror", ImportFailed, Some(Application), false),
    ("cannot open shared object file", ImportFailed, Some(Application), false),
    ("undefined symbol", ImportFailed, Some(Application), false),
    // Access, and networks.
    ("gatedrepoerror", AccessDenied, Some(Application), false),
    ("cannot access gated repo", AccessDenied, Some(Application), false),
    ("is restricted. you must", AccessDenied, Some(Application), false),
    ("401 client error", AccessDenied, Some(Application), false),
    ("403 client error", AccessDenied, Some(Application), false),
    ("repositorynotfounderror", AccessDenied, Some(Application), false),
    ("invalid user token", AccessDenied, Some(Application), false),
    ("api_key not configured", AccessDenied, Some(Application), false),
    ("api key must be", AccessDenied, Some(Application), false),
    ("temporary failure in name resolution", NetworkError, None, false),
    ("name or service not known", NetworkError, None, false),
    ("max retries exceeded with url", NetworkError, None, false),
    ("429 client error", NetworkError, None, false),
    ("address already in use", AddressInUse, None, false),
    ("eaddrinuse", AddressInUse, None, false),
    // Signals, as shells and torchrun tell them.
    ("segmentation fault", SegmentationFault, None, false),
    ("illegal instruction", IllegalInstruction, Some(Application), false),
    ("bus error", BusError, None, false),
];

/// Words in lines that tell of no end: somebody goes on after them.
const HARMLESS: [&str; 5] = ["retrying", "will retry", "userwarning", "futurewarning", "deprecat"];

/// The row of a line.
pub(super) fn find(line: &str) -> Option<(Class, Option<Whose>, bool)> {
    let lower = line.to_ascii_lowercase();
    if HARMLESS.iter().any(|word| lower.contains(word)) {
        return None;
    }
    let row = TABLE.iter().find(|(text, ..)| lower.contains(text))?;
    Some((row.1, row.2, row.3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_row_hides_another() {
        for (n, (text, ..)) in TABLE.iter().enumerate() {
            assert_eq!(*text, text.to_ascii_lowercase());
            let first = TABLE.iter().position(|(earlier, ..)| text.contains(earlier));
            assert_eq!(first, Some(n), "`{text}` is never found");
        }
    }
}
