use super::*;

fn exit(code: i32) -> Exit {
    Exit { code, signal: (code > 128).then_some(code - 128) }
}

fn fault(code: i32, lines: &[&str], error: &[&str], oom_kill: bool, stopping: bool) -> Option<Fault> {
    let error: Vec<String> = error.iter().map(|line| (*line).to_owned()).collect();
    classify(&Evidence { exit: exit(code), lines, error: &error, oom_kill, stopping })
}

/// The class, whose, and `effect` for a consequence.
fn check(code: i32, text: &str, expected: &str) {
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(word(fault(code, &lines, &[], false, false)), expected, "{text}");
}

fn word(fault: Option<Fault>) -> String {
    let Some(fault) = fault else { return "-".to_owned() };
    let whose = fault.whose.map(|whose| format!(" {whose:?}")).unwrap_or_default();
    let effect = if fault.consequence { " effect" } else { "" };
    format!("{:?}{whose}{effect}", fault.class)
}

#[test]
fn memory() {
    check(
        1,
        "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\n\
         torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB",
        "GpuOutOfMemory Application",
    );
    check(
        1,
        "[rank3]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        "GpuOutOfMemory Application",
    );
    check(
        1,
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.",
        "GpuOutOfMemory Application",
    );
    check(1, "RuntimeError: DataLoader worker (pid 123) is killed by signal: Killed. ", "HostOutOfMemory Application");
    check(1, "MemoryError", "HostOutOfMemory Application");
    check(
        1,
        "RuntimeError: DataLoader worker (pid 123) is killed by signal: Bus error. It is possible that dataloader's \
         workers are out of shared memory. Please try to raise your shared memory limit.",
        "SharedMemoryFull Application",
    );
    check(
        1,
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "SharedMemoryFull Application",
    );
    check(135, "", "BusError");
}

#[test]
fn gpus() {
    check(1, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "GpuError");
    check(1, "RuntimeError: CUDA error: uncorrectable ECC error encountered", "GpuHardware Node");
    check(1, "RuntimeError: CUDA error: device-side assert triggered", "GpuAssert Application");
    check(1, "RuntimeError: CUDA error: unspecified launch failure", "GpuError");
    check(
        1,
        "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU",
        "GpuHardware Node",
    );
    check(1, "RuntimeError: CUDA error: invalid device ordinal", "GpuError Application");
    check(1, "RuntimeError: CUDA error: something new", "GpuError");
    check(
        134,
        "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: an illegal memory access was encountered",
        "GpuError",
    );
}

#[test]
fn collectives() {
    check(
        1,
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, \
         remote process exited or there was a network error, NCCL version 2.21.5\n\
         [rank0]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n\
         [rank0]: Last error:\n[rank0]: socketProgress: Connection closed by remote peer node2<45678>",
        "PeerGone effect",
    );
    check(
        134,
        "[rank1]:[E1101 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: \
         WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.\n\
         terminate called after throwing an instance of 'c10::DistBackendError'",
        "CollectiveTimeout effect",
    );
    check(
        1,
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:44321",
        "PeerGone effect",
    );
    check(
        1,
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "CollectiveTimeout effect",
    );
    check(
        1,
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        "PeerGone effect",
    );
    check(
        1,
        "node1:12:34 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<1> with status=12 opcode=0",
        "FabricError effect",
    );
    check(1, "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.", "CollectiveError Application");
    check(
        1,
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        "CollectiveError effect",
    );
}

#[test]
fn a_cause_wins_over_its_effects() {
    // Eight processes of a node behind one pipe.
    check(
        1,
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n\
         [rank0]: torch.distributed.DistBackendError: NCCL error in: x, remote process exited or there was a network error\n\
         [rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n\
         torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
        "GpuOutOfMemory Application",
    );
    // An exception that says less than the one that it came of.
    check(
        1,
        "OSError: [Errno 28] No space left on device: '/checkpoints/step-100'\n\
         During handling of the above exception, another exception occurred:\nRuntimeError: the checkpoint was not written",
        "DiskFull",
    );
    // One that was dealt with long ago does not count.
    let handled = format!("CUDA out of memory, halving the batch\n{}ValueError: bad shape", "step\n".repeat(NEAR));
    check(1, &handled, "Exception Application");
    check(1, "CUDA out of memory, retrying\nValueError: bad shape", "Exception Application");
    check(1, "ValueError: bad shape\nRuntimeError: Connection reset by peer", "PeerGone effect");
}

#[test]
fn others() {
    check(1, "OSError: [Errno 122] Disk quota exceeded", "DiskFull Application");
    check(
        1,
        "RuntimeError: [enforce fail at inline_container.cc:603] . PytorchStreamWriter failed writing file data/1: file write failed",
        "DiskFull",
    );
    check(
        1,
        "AssertionError: Rank 3: found NaN in local forward loss calculation. Device: 3, node: n1",
        "NotANumber Application",
    );
    check(
        1,
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        "NotANumber Application",
    );
    check(1, "ModuleNotFoundError: No module named 'flash_attn'", "ImportFailed Application");
    check(
        1,
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "ImportFailed Application",
    );
    check(
        1,
        "OSError: You are trying to access a gated repo.\nCannot access gated repo for url https://hub/meta/resolve/main/config.json.\n\
         Access to model meta is restricted. You must have access to it and be authenticated to access it.",
        "AccessDenied Application",
    );
    check(
        1,
        "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://hub/api",
        "AccessDenied Application",
    );
    check(
        1,
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "DamagedCheckpoint",
    );
    check(
        1,
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE",
        "AddressInUse",
    );
    check(1, "KeyError: 'model.layers.0'", "Exception Application");
    check(1, "nothing that says anything", "-");
    check(0, "KeyError: 'x'", "-");
    check(3, "", "-");
}

#[test]
fn signals() {
    check(139, "", "SegmentationFault");
    check(132, "", "IllegalInstruction Application");
    check(134, "", "Aborted");
    check(137, "", "Killed");
    check(143, "", "Stopped effect");
    check(137, "ValueError: an older exception", "Killed");
    assert_eq!(word(fault(137, &[], &[], true, false)), "HostOutOfMemory Application");
    assert_eq!(word(fault(137, &["CUDA out of memory"], &[], true, false)), "HostOutOfMemory Application");
    // Somebody else of the group was killed.
    assert_eq!(word(fault(139, &[], &[], true, false)), "SegmentationFault");
    assert_eq!(word(fault(137, &[], &[], false, true)), "Stopped effect");
    assert_eq!(word(fault(1, &["CUDA out of memory"], &[], false, true)), "GpuOutOfMemory Application effect");
}

#[test]
fn torchrun() {
    let summary = [
        "E1101 10:00:00.1 api.py:869] failed (exitcode: -9) local_rank: 1 (pid: 4242) of binary: /usr/bin/python",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "============================================================",
        "train.py FAILED",
        "Failures:",
        "  <NO_OTHER_FAILURES>",
        "------------------------------------------------------------",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-01-01_10:00:00",
        "  host      : n1",
        "  rank      : 9 (local_rank: 1)",
        "  exitcode  : -9 (pid: 4242)",
        "  error_file: <N/A>",
        "  traceback : Signal 9 (SIGKILL) received by PID 4242",
    ];
    let killed = fault(1, &summary, &[], false, false).expect("a fault");
    assert_eq!((killed.class, killed.torch_rank), (Class::Killed, Some(9)));
    assert_eq!(word(fault(1, &summary, &[], true, false)), "HostOutOfMemory Application");
    // Its error file is of the process that failed first, whatever came last in the output.
    let lines = ["ValueError: of another rank"];
    let error = ["  File \"train.py\", line 3", "KeyError: 'x'"];
    let first = fault(1, &lines, &error, false, false).expect("a fault");
    assert_eq!(first.line, "KeyError: 'x'");
    let error = ["torch.OutOfMemoryError: CUDA out of memory. Tried"];
    assert_eq!(
        word(fault(1, &["RuntimeError: CUDA error: unspecified launch failure"], &error, false, false)),
        "GpuOutOfMemory Application"
    );
}

#[test]
fn a_line_is_cut_between_characters() {
    let long = format!("ValueError: {}", "é".repeat(1000));
    let fault = fault(1, &[&long], &[], false, false).expect("a fault");
    assert!(fault.line.len() <= LONGEST_LINE && fault.line.len() > LONGEST_LINE - 3);
}

#[test]
fn what_is_empty_is_left_out_and_taken_for_it() {
    let killed = of_signal(9, false);
    let json = serde_json::to_string(&killed).expect("JSON");
    assert_eq!(json, r#"{"class":"killed"}"#);
    assert_eq!(serde_json::from_str::<Fault>(&json).ok(), Some(killed));
}

proptest::proptest! {
    #[test]
    fn any_lines_are_read_without_a_fault(
        lines in proptest::collection::vec("(exitcode|rank|Root Cause|Error|\\[rank3\\]: |[: .-]|\\PC|[0-9]){0,8}", 0..8),
        code in 0..256,
    ) {
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let _ = fault(code, &lines, &[], false, false);
    }
}
