//! What the last lines of a rank say of why it ended.
//!
//! The words are those that PyTorch, NCCL, Gloo, JAX, the C library and the kernel print. They are looked for as they
//! stand, in at most 64 lines of at most 4 KiB each, whatever else stands there.

use super::fault::Kind;

/// Lines that are read, from the last.
const LINES: usize = 64;

/// Bytes of a line that are read.
const LINE: usize = 4096;

/// Words and what they say; of several, the first of the table counts. Causes stand before what follows from them:
/// a rank whose memory is full often prints an error of CUDA and one of NCCL, too.
const SAYS: [(&str, Kind); 41] = [
    ("uncorrectable ECC error encountered", Kind::DeviceUnhealthy),
    ("uncorrectable NVLink error", Kind::DeviceUnhealthy),
    ("no CUDA-capable device is detected", Kind::DeviceUnhealthy),
    ("GPU is lost", Kind::DeviceUnhealthy),
    ("No space left on device", Kind::DiskFull),
    ("Disk quota exceeded", Kind::DiskFull),
    ("CUDA out of memory", Kind::GpuOutOfMemory),
    ("CUDA error: out of memory", Kind::GpuOutOfMemory),
    ("CUBLAS_STATUS_ALLOC_FAILED", Kind::GpuOutOfMemory),
    ("RESOURCE_EXHAUSTED: Out of memory", Kind::GpuOutOfMemory),
    ("is killed by signal: Killed", Kind::HostOutOfMemory),
    ("Cannot allocate memory", Kind::HostOutOfMemory),
    ("std::bad_alloc", Kind::HostOutOfMemory),
    ("oom-kill", Kind::HostOutOfMemory),
    // An index out of bounds in a kernel is the program's, not the device's.
    ("device-side assert triggered", Kind::Exit),
    ("Watchdog caught collective operation timeout", Kind::NcclTimeout),
    ("ms for recv operation to complete", Kind::NcclTimeout),
    ("ms for send operation to complete", Kind::NcclTimeout),
    ("an illegal memory access was encountered", Kind::Cuda),
    ("unspecified launch failure", Kind::Cuda),
    ("misaligned address", Kind::Cuda),
    ("CUBLAS_STATUS_", Kind::Cuda),
    ("CUDNN_STATUS_", Kind::Cuda),
    ("ncclUnhandledCudaError", Kind::Cuda),
    ("CUDA error:", Kind::Cuda),
    ("CUDA driver error:", Kind::Cuda),
    ("ncclRemoteError", Kind::PeerLost),
    ("remote process exited or there was a network error", Kind::PeerLost),
    ("Connection closed by remote peer", Kind::PeerLost),
    ("Connection closed by peer", Kind::PeerLost),
    ("Connection reset by peer", Kind::PeerLost),
    ("Connection was likely closed", Kind::PeerLost),
    ("NCCL communicator was aborted", Kind::PeerLost),
    ("got signal: 15", Kind::PeerLost),
    ("JAX distributed service detected fatal errors", Kind::PeerLost),
    ("ncclSystemError", Kind::Nccl),
    ("ncclInternalError", Kind::Nccl),
    ("ncclInvalidUsage", Kind::Nccl),
    ("ibv_poll_cq", Kind::Nccl),
    ("Got completion from peer", Kind::Nccl),
    ("NCCL error", Kind::Nccl),
];

/// What the lines say, if anything that is known.
#[must_use]
pub fn says<S: AsRef<str>>(lines: &[S]) -> Option<Kind> {
    let lines = lines.iter().rev().take(LINES).map(|line| {
        let line = line.as_ref();
        let end = (0..=LINE.min(line.len())).rev().find(|end| line.is_char_boundary(*end));
        &line[..end.unwrap_or(0)]
    });
    let lines: Vec<&str> = lines.collect();
    SAYS.iter().find(|(words, _)| lines.iter().any(|line| line.contains(words))).map(|(_, kind)| *kind)
}

/// What ended a rank, by how it ended and what it said last. `out_of_memory` is whether its container or node killed
/// it for its memory, as only the node knows. None for one that ended as it should.
#[must_use]
pub fn ended<S: AsRef<str>>(code: i32, signal: Option<i32>, out_of_memory: bool, lines: &[S]) -> Option<Kind> {
    if code == 0 {
        return None;
    }
    if out_of_memory {
        return Some(Kind::HostOutOfMemory);
    }
    Some(match (says(lines), signal) {
        (Some(said), _) => said,
        // SIGTERM, which the platform did not send: the launcher's, once another rank of it had failed.
        (None, Some(15)) => Kind::PeerLost,
        (None, Some(_)) => Kind::Signal,
        (None, None) if (129..=192).contains(&code) => {
            if code == 128 + 15 {
                Kind::PeerLost
            } else {
                Kind::Signal
            }
        }
        (None, None) => Kind::Exit,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn real_lines_are_understood() {
        let cases = [
            (
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
                Kind::GpuOutOfMemory,
            ),
            ("[rank3]: torch.AcceleratorError: CUDA error: an illegal memory access was encountered", Kind::Cuda),
            ("RuntimeError: CUDA error: uncorrectable ECC error encountered", Kind::DeviceUnhealthy),
            ("RuntimeError: CUDA error: device-side assert triggered", Kind::Exit),
            (
                "[rank0]:[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072000, NumelOut=131072000, Timeout(ms)=600000) ran for 600081 milliseconds before timing out.",
                Kind::NcclTimeout,
            ),
            (
                "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
                Kind::PeerLost,
            ),
            (
                "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:22110",
                Kind::PeerLost,
            ),
            (
                "torch.distributed.elastic.multiprocessing.api.SignalException: Process 77 got signal: 15",
                Kind::PeerLost,
            ),
            ("OSError: [Errno 28] No space left on device", Kind::DiskFull),
            ("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ", Kind::HostOutOfMemory),
        ];
        for (line, kind) in cases {
            assert_eq!(says(&["step 12 loss 3.4", line, "  File \"train.py\", line 7"]), Some(kind), "{line}");
        }
        assert_eq!(says(&["ValueError: bad batch"]), None);
    }

    #[test]
    fn a_cause_counts_more_than_what_followed() {
        let lines =
            ["ncclUnhandledCudaError: Call to CUDA function failed.", "torch.OutOfMemoryError: CUDA out of memory."];
        assert_eq!(says(&lines), Some(Kind::GpuOutOfMemory));
        let lines = ["CUDA error: unspecified launch failure", "NCCL communicator was aborted on rank 3."];
        assert_eq!(says(&lines), Some(Kind::Cuda));
    }

    #[test]
    fn ends_have_classes() {
        let none: [&str; 0] = [];
        let cases = [
            (0, None, false, None),
            (1, None, false, Some(Kind::Exit)),
            (139, Some(11), false, Some(Kind::Signal)),
            (139, None, false, Some(Kind::Signal)),
            (137, Some(9), true, Some(Kind::HostOutOfMemory)),
            (137, Some(9), false, Some(Kind::Signal)),
            (143, Some(15), false, Some(Kind::PeerLost)),
            (143, None, false, Some(Kind::PeerLost)),
            (255, None, false, Some(Kind::Exit)),
        ];
        for (code, signal, oom, kind) in cases {
            assert_eq!(ended(code, signal, oom, &none), kind, "{code} {signal:?}");
        }
    }

    #[test]
    fn garbage_is_harmless() {
        let long = "é".repeat(1 << 20);
        assert_eq!(says(&[long.as_str(), "\0\u{fffd}"]), None);
        let many = vec!["CUDA error: x"; 100_000];
        assert_eq!(says(&many), Some(Kind::Cuda));
    }
}
