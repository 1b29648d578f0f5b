use super::*;
use crate::protocol::Value;

fn check(line: &str, expected: &str) {
    let speaker = |s: Option<u32>| s.map(|s| format!("@{s} ")).unwrap_or_default();
    let got = match read(line) {
        None => "-".to_owned(),
        Some(Line { speaker: s, seen }) => speaker(s) + &shown(&seen),
    };
    assert_eq!(got, expected, "{line}");
}

fn shown(seen: &Seen) -> String {
    let tokens = |tokens: &Option<u64>| tokens.map(|t| format!("tokens {t} ")).unwrap_or_default();
    match seen {
        Seen::Bar(step, total) => format!("bar {step}/{total}"),
        Seen::Values(t, values) => format!("{}{}", tokens(t), render(values)),
        Seen::Evaluation(step, values) => {
            format!("evaluation {} {}", step.map_or("-".to_owned(), |s| s.to_string()), render(values))
        }
        Seen::Step(p) => {
            let total = p.total_steps.map(|t| format!("/{t}")).unwrap_or_default();
            format!("{}{total} {}{}", p.step, tokens(&p.tokens), render(&p.values))
        }
    }
}

fn render(values: &Values) -> String {
    let show = |(name, value): (&String, &Value)| match value {
        Value::Number(n) => format!("{name}={}", (n * 1e9).round() / 1e9),
        Value::Text(t) => format!("{name}={t}"),
    };
    values.iter().map(show).collect::<Vec<_>>().join(" ")
}

#[test]
fn torchtitan() {
    // 2026, with torchrun's `--tee`; 2025; 2024; forge.
    check(
        "[rank0]:[titan] 2026-02-07 10:00:00,123 - root - INFO - step: 10  loss: 12.27210  grad_norm:  3.1500  \
         memory: 40.43GiB(51.04%)  tps: 1,215  tflops: 1,007.04  mfu: 0.75%",
        "@0 10 grad_norm=3.15 loss=12.2721 memory_gib=40.43 mfu=0.0075 tflops_per_gpu=1007.04 \
         tokens_per_second_per_gpu=1215",
    );
    check(
        "[rank0]:2025-07-01 10:00:00,123 - root - INFO - step:  1  loss: 10.9124  memory:  9.75GiB(12.31%)  \
         tps: 3,218  tflops: 7.04  mfu: N/A",
        "@0 1 loss=10.9124 memory_gib=9.75 tflops_per_gpu=7.04 tokens_per_second_per_gpu=3218",
    );
    check(
        "2024-06-03 19:50:01,520 - root - INFO - step:  1  loss: 10.9124  memory:  9.75GiB(12.31%)  wps: 3,218  mfu: 8.31%",
        "1 loss=10.9124 memory_gib=9.75 mfu=0.0831 tokens_per_second_per_gpu=3218",
    );
    check(
        "step:  5  loss:  7.10000  grad_norm:  1.0000  memory: 30.10GiB  tps: 900  mfu: 41.00%",
        "5 grad_norm=1 loss=7.1 memory_gib=30.1 mfu=0.41 tokens_per_second_per_gpu=900",
    );
    let nan = "[titan] INFO - step: 11  loss:      nan  grad_norm:     nan  memory: 1.00GiB(2.00%)  tps: 9  tflops: 1.00  mfu: 1.00%";
    check(nan, "11 grad_norm=NaN loss=NaN memory_gib=1 mfu=0.01 tflops_per_gpu=1 tokens_per_second_per_gpu=9");
}

#[test]
fn torchtitan_s_other_lines() {
    check(
        "[rank0]:[titan] INFO - validate step: 10  loss: 11.1000  memory: 40.43GiB(51.04%)  tps: 1,215",
        "@0 evaluation 10 eval_loss=11.1",
    );
    // A stage of a pipeline that has no loss.
    check("[rank0]:[titan] INFO - step: 10  loss: -1.00000  grad_norm: 3.1  memory: 4.4GiB(5.0%)  tps: 1,215", "-");
    check("[titan] INFO - Saving the checkpoint (or staging if async is enabled).", "-");
    check("[titan] INFO - Training starts at step 1", "-");
    check("[titan] INFO - Model llama3 size: 8,030,261,248 total parameters, loss parallel", "-");
}

#[test]
fn colours_are_no_part_of_a_line() {
    let line = "\x1b[31mstep:  1  \x1b[32mloss:  8.00000  \x1b[38;2;180;60;0mgrad_norm:  1.5000  \
                \x1b[38;2;54;234;195mmemory:  1.00GiB(2.00%)  \x1b[34mtps: 7,000  \x1b[36mtflops: 0.10  \
                \x1b[35mmfu: 0.03%\x1b[39m";
    check(
        &crate::log::plain(line),
        "1 grad_norm=1.5 loss=8 memory_gib=1 mfu=0.0003 tflops_per_gpu=0.1 tokens_per_second_per_gpu=7000",
    );
}

#[test]
fn megatron() {
    check(
        " [2026-05-01 10:00:00.123456] iteration       10/  500000 | consumed samples:         2560 | elapsed time per \
         iteration (ms): 1250.0 | throughput per GPU (TFLOP/s/GPU): 400.1 | learning rate: 1.500000E-06 | \
         global batch size:   256 | lm loss: 1.082110E+01 | mtp_1 loss: 1.1E+01 | loss scale: 1.0 | grad norm: 5.126 | \
         num zeros: 12 | params norm: 301.1 | number of skipped iterations:   0 | number of nan iterations:   0 |",
        "10/500000 grad_norm=5.126 iteration_ms=1250 learning_rate=0.0000015 loss=10.8211 samples_per_second=204.8 \
         tflops_per_gpu=400.1",
    );
    // Versions of 2021 and Megatron-DeepSpeed.
    check(
        " iteration      100/    2000 | consumed samples: 800 | elapsed time per iteration (ms): 90.1 | \
         learning rate: 1.0E-04 | lm loss: nan | loss scale: 1.0 |",
        "100/2000 iteration_ms=90.1 learning_rate=0.0001 loss=NaN",
    );
    check(
        " iteration        7/      10 | consumed samples:   56 | consumed tokens:    114688 | elapsed time per iteration \
         (s): 0.55 | elapsed time per iteration (ms): 550.0 | learning rate: 1.0E-04 | global batch size:  8 | lm loss: 9.5E+00 | \
         grad norm: 1.0 | actual seqlen:  2048 | samples per second: 14.5 | TFLOPs: 12.3 |",
        "7/10 tokens 114688 grad_norm=1 iteration_ms=550 learning_rate=0.0001 loss=9.5 samples_per_second=14.545454545 \
         tflops_per_gpu=12.3",
    );
    // An iteration without a loss: all were skipped.
    check(
        " [2026-05-01 10:00:00] iteration        3/     500 | consumed samples:  24 | elapsed time per iteration (ms): 80.0 | \
         learning rate: 0.000000E+00 | global batch size:     8 | loss scale: 2147483648.0 | \
         number of skipped iterations:   1 | number of nan iterations:   1 |",
        "3/500 iteration_ms=80 learning_rate=0 nan_iterations=1 samples_per_second=100 skipped_iterations=1",
    );
}

#[test]
fn megatron_s_evaluations() {
    check(
        " validation loss at iteration 1000 on validation set | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | ",
        "evaluation 1000 eval_loss=2.5",
    );
    check(
        " validation loss at iteration 1000 | lm loss value: 2.500000E+00 | lm loss PPL: 1.2E+01 | ",
        "evaluation 1000 eval_loss=2.5",
    );
    check(
        " validation loss at the end of training for val data | lm loss value: 2.4E+00 | lm loss PPL: 1.1E+01 |",
        "evaluation - eval_loss=2.4",
    );
    check(" validation loss at iteration 1000 on test set | lm loss value: 9.5E+00 | lm loss PPL: 1.2E+01 | ", "-");
    check("Step Time : 1.23s GPU utilization: 400.1MODEL_TFLOP/s/GPU", "-");
    check("saving checkpoint at iteration     100 to /ckpt in torch_dist format", "-");
}

#[test]
fn nemo() {
    check(
        "Training epoch 1, iteration 28/99 | lr: 5.6e-06 | global_batch_size: 32 | global_step: 128 | \
         reduced_train_loss: 2.778 | train_step_timing in s: 0.25 | consumed_samples: 928 | val_loss: 2.861",
        "128 eval_loss=2.861 iteration_ms=250 learning_rate=0.0000056 loss=2.778 samples_per_second=128",
    );
}

#[test]
fn trainer() {
    check(
        "{'loss': 2.5613, 'grad_norm': 1.2, 'learning_rate': 4.9e-05, 'epoch': 0.01}",
        "epoch=0.01 grad_norm=1.2 learning_rate=0.000049 loss=2.5613",
    );
    check(
        "{'loss': '0.41', 'grad_norm': '0.7', 'learning_rate': '2e-05', 'epoch': '1'}",
        "epoch=1 grad_norm=0.7 learning_rate=0.00002 loss=0.41",
    );
    check("{'loss': nan, 'grad_norm': nan, 'epoch': 1.0}", "epoch=1 grad_norm=NaN loss=NaN");
    check(
        "{'eval_loss': 2.1, 'eval_runtime': 3.2, 'eval_samples_per_second': 9.0, 'epoch': 1.0}",
        "evaluation - epoch=1 eval_loss=2.1",
    );
    check("{'eval_accuracy': 0.5, 'eval_runtime': 3.2, 'epoch': 1.0}", "-");
    check("{'train_runtime': 12.3, 'train_samples_per_second': 8.1, 'train_loss': 2.1, 'epoch': 1.0}", "-");
    check(" 10%|█         | 50/500 [00:10<01:30,  5.00it/s]", "bar 50/500");
    check("  0%|          | 0/500 [00:00<?, ?it/s]", "bar 0/500");
    for other in [
        "Map:  10%|█         | 50/500 [00:10<01:30,  5.00it/s]",
        "Epoch 0:  20%|██        | 20/100 [00:10<00:40,  1.95it/s, v_num=0, train_loss=2.3]",
        "model.safetensors:  20%|██        | 1.00G/5.00G [00:10<00:40,  100MB/s]",
        " 20%|██        | 1.00G/5.00G [00:10<00:40,  100MB/s]",
    ] {
        check(other, "-");
    }
}

#[test]
fn trainers_of_others() {
    // TRL's SFTTrainer and DPOTrainer.
    check(
        "{'loss': 1.9, 'grad_norm': 2.5, 'learning_rate': 2e-05, 'num_tokens': 81920.0, 'mean_token_accuracy': 0.6, 'epoch': 0.1}",
        "tokens 81920 epoch=0.1 grad_norm=2.5 learning_rate=0.00002 loss=1.9",
    );
    check(
        "{'loss': 0.69, 'learning_rate': 1e-06, 'rewards/chosen': 0.1, 'rewards/accuracies': 0.5, 'epoch': 0.1}",
        "epoch=0.1 learning_rate=0.000001 loss=0.69",
    );
    // LLaMA-Factory.
    check(
        "[INFO|2026-01-01 10:00:00] llamafactory.train.callbacks:143 >> {'loss': 0.5100, 'learning_rate': 4.9000e-05, 'epoch': 0.10, 'throughput': 1234.56}",
        "epoch=0.1 learning_rate=0.000049 loss=0.51 tokens_per_second=1234.56",
    );
}

#[test]
fn plain_loops() {
    check("step 120/300 loss 2.31", "120/300 loss=2.31");
    check("iter 10: loss 3.2000, time 12.10ms, mfu 3.20%", "10 iteration_ms=12.1 loss=3.2 mfu=0.032");
    check("iter 0: loss 10.9, time 3312.10ms, mfu -100.00%", "0 iteration_ms=3312.1 loss=10.9");
    check("step 250: train loss 4.2000, val loss 4.4000", "evaluation 250 eval_loss=4.4");
    check("epoch 3 step 500 | train loss 2.1 | val loss 2.3 | 1.5s", "500 epoch=3 eval_loss=2.3 loss=2.1");
    check("step=1,200 loss=0.5 lr=1e-3 tokens/s=12,000", "1200 learning_rate=0.001 loss=0.5 tokens_per_second=12000");
    check(
        "step    12/19560 | loss 7.312345 (+1.2z)| norm 2.1 (+0.1z)| lr 1.0e-05 | 123.4 ms | 40.1% bf16 MFU | 120000 tok/s",
        "12/19560 grad_norm=2.1 learning_rate=0.00001 loss=7.312345",
    );
    check("Step 5 | loss: inf", "5 loss=Infinity");
    check("Epoch [2/5], Step [100/600], Loss: 0.2345", "700/3000 loss=0.2345");
    check(
        "step 3/400 loss 2.1 lr 1.00e-04 grad 0.51 tokens/s 12345",
        "3/400 learning_rate=0.0001 loss=2.1 tokens_per_second=12345",
    );
}

#[test]
fn torchtune_and_maxtext() {
    check(
        "Step 5 | loss:1.25 lr:0.0003 tokens_per_second_per_gpu:1234.5 peak_memory_active:12.1",
        "5 learning_rate=0.0003 loss=1.25 tokens_per_second_per_gpu=1234.5",
    );
    check(
        "completed step: 7, seconds: 1.25, TFLOP/s/device: 123.4, Tokens/s/device: 4567.8, total_weights: 65536, loss: 7.654",
        "7 iteration_ms=1250 loss=7.654 tflops_per_gpu=123.4 tokens_per_second_per_gpu=4567.8",
    );
}

#[test]
fn litgpt() {
    check(
        "Epoch 1 | iter 80 step 20 | loss train: 2.345, val: n/a | iter time: 123.45 ms (step) remaining time: 0:10:00",
        "20 epoch=1 iteration_ms=123.45 loss=2.345",
    );
    check("iter 10 step 2: loss 2.3451, iter time: 123.45ms (optimizer.step)", "2 iteration_ms=123.45 loss=2.3451");
    check("iter 80: val loss 2.3456, val time: 123.45 ms", "evaluation - eval_loss=2.3456");
}

#[test]
fn evaluations_are_no_steps() {
    check("Validation | step 100 | loss 2.3", "evaluation 100 eval_loss=2.3");
    check("[eval] step 100 loss: 2.3", "evaluation 100 eval_loss=2.3");
    check("step 100: val_loss=2.5", "evaluation 100 eval_loss=2.5");
    // Names that only sound like it.
    check("[my-test-run] dev node-1.eval step 100 loss: 2.3 params norm: 3", "100 loss=2.3");
    check("test loss 2.5 at step 100", "-");
    check("step 100 | loss 2.3 | val_loss 2.5", "100 eval_loss=2.5 loss=2.3");
}

#[test]
fn json_lines() {
    check(r#"{"step": 10, "loss": 2.5, "lr": 1e-4, "message": "x"}"#, "10 learning_rate=0.0001 loss=2.5");
    check(
        r#"{"train/loss": 2.5, "train/grad_norm": "NaN", "train/global_step": 7, "total_steps": 9, "tokens": 99}"#,
        "7/9 tokens 99 grad_norm=NaN loss=2.5",
    );
    check(
        r#"{"current_steps": 5, "total_steps": 50, "loss": 1.5, "lr": 5e-06, "epoch": 0.3, "throughput": 512.5, "total_tokens": 4096}"#,
        "5/50 tokens 4096 epoch=0.3 learning_rate=0.000005 loss=1.5 tokens_per_second=512.5",
    );
    check(
        r#"{"step": 10, "note": "no \" NaN here", "loss": NaN, "grad_norm": -Infinity, "lr": Infinity}"#,
        "10 grad_norm=-Infinity learning_rate=Infinity loss=NaN",
    );
    check(r#"{"step": 10, "eval_loss": 2.5, "learning_rate": 3}"#, "evaluation 10 eval_loss=2.5");
    check(r#"{"step": 10, "mfu": 41.5, "step_time": 0.25}"#, "10 iteration_ms=250 mfu=0.415");
    check(r#"[rank2]:{"step": 10, "loss": 2.5}"#, "@2 10 loss=2.5");
    for other in [
        r#"{"level": "info", "step": 3, "msg": "loading, loss unknown"}"#,
        r#"{"loss": 2.5}"#,
        r#"{"step": -1, "loss": 2.5}"#,
        r#"{"step": 1.5, "loss": 2.5}"#,
        r#"{"step": 10, "loss": 2.5"#,
        r#"{"step": 10, "loss": {"a": 2.5}}"#,
        r#"{"step": 10, "loss": 2.5} trailing"#,
        "{}",
        "{",
    ] {
        check(other, "-");
    }
}

#[test]
fn tags_of_event_files_have_the_same_names() {
    for (tag, value, expected) in [
        // transformers.
        ("train/loss", 2.5, Some(("loss", 2.5))),
        ("train/grad_norm", 2.5, Some(("grad_norm", 2.5))),
        ("train/learning_rate", 2.5, Some(("learning_rate", 2.5))),
        ("eval/loss", 2.5, Some(("eval_loss", 2.5))),
        ("train/train_loss", 2.5, None),
        // torchtitan.
        ("loss_metrics/global_avg_loss", 2.5, Some(("loss", 2.5))),
        ("loss_metrics/global_max_loss", 2.5, None),
        ("validation_metrics/loss", 2.5, Some(("eval_loss", 2.5))),
        ("throughput(tps)", 2.5, Some(("tokens_per_second_per_gpu", 2.5))),
        ("mfu(%)", 50.0, Some(("mfu", 0.5))),
        ("time_metrics/end_to_end(s)", 0.5, Some(("iteration_ms", 500.0))),
        ("memory/max_reserved(GiB)", 2.5, Some(("memory_gib", 2.5))),
        // Megatron.
        ("lm loss", 2.5, Some(("loss", 2.5))),
        ("lm loss vs samples", 2.5, None),
        ("lm loss validation", 2.5, Some(("eval_loss", 2.5))),
        ("iteration-time", 0.5, Some(("iteration_ms", 500.0))),
        ("grad-norm", 2.5, Some(("grad_norm", 2.5))),
        // nanoGPT.
        ("mfu", -100.0, None),
        ("mfu", 41.0, Some(("mfu", 0.41))),
    ] {
        assert_eq!(names::named(tag, value), expected, "{tag}");
    }
    assert_eq!(names::named(&"loss".repeat(1000), 1.0), None);
}

#[test]
fn other_lines_are_no_progress() {
    for line in [
        "loading step 5 of the pipeline",
        "using cross entropy loss",
        "loss function: mse, steps: 100",
        "step 4: saving checkpoint",
        "footstep 4 gloss 3",
        "100%|██████████| x/y [",
        "loss: 3.2",
        "",
        "ünïcödé 5 stép löss",
        "{'loss_function': 'mse', 'steps': 100}",
        "args: {'train_loss': 3, 'a': 'b'",
    ] {
        check(line, "-");
    }
}

#[test]
fn numbers_in_every_spelling() {
    for (text, expected) in [("1e-5,", 1e-5), ("1.50E+01 |", 15.0), ("12,345.5", 12345.5), ("-3.", -3.0), ("7%", 0.07)]
    {
        assert_eq!(scan::number(text), Some(expected), "{text}");
    }
    assert_eq!(scan::number("-inf"), Some(f64::NEG_INFINITY));
    for text in ["", "-", "e5", "none", "1e999"] {
        assert_eq!(scan::number(text), None, "{text}");
    }
}

/// Nothing here is slow on purpose: the time for a line must not grow faster than the line.
#[test]
fn hostile_lines_are_read_at_once() {
    let long = "x".repeat(1 << 20);
    let inner = "'loss': ".repeat(240);
    let deep = format!("{{\"step\":{}", "[".repeat(10_000));
    for line in [
        long.as_str(),
        &format!("step loss {}", &long[..1900]),
        &"loss ".repeat(400),
        &"val loss: ".repeat(200),
        &format!("{{{inner}}}"),
        &"{'".repeat(900),
        &format!("{{\"{}", &long[..16_000]),
        &deep,
        &"1,".repeat(1000),
        &format!("step {} loss 1", "9".repeat(1900)),
        "[rank99999999999999999999]: step 1 loss 2",
        "\u{fffd}\u{fffd} loss \u{fffd}",
        "val\u{e9} loss 3 step 1",
    ] {
        let _ = read(line);
    }
    check(&format!("step 1 loss 2 {long}"), "-");
}

proptest::proptest! {
    #[test]
    fn any_line_is_read_without_a_fault(
        line in "(\\[rank|\\]:|step|iter|loss|val|eval|epoch|elapsed time per iteration|\\{'|\\{\"|[ :=/%|'\"{},.0-9e+-]|\\PC){0,40}",
    ) {
        let _ = read(&line);
    }
}

/// Time for a line: `cargo test -p aviflow-agent --lib --release cost_of -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn cost_of_a_line() {
    let loss = "[rank0]:[titan] 2026-02-07 10:00:00,123 - root - INFO - step: 10  loss: 12.27210  grad_norm:  3.1500  \
                memory: 40.43GiB(51.04%)  tps: 1,215  tflops: 1,007.04  mfu: 0.75%";
    let other = "2026-02-07 10:00:00,123 - root - INFO - prefetched batch 1234 of shard 17 in 12.5 ms, 4096 tokens, ok";
    let json = r#"{"step": 10, "loss": 2.5, "lr": 1e-4, "grad_norm": 1.0, "tokens_per_second": 12000}"#;
    for (name, line) in [("a step", loss), ("JSON", json), ("another", other)] {
        let began = std::time::Instant::now();
        for _ in 0..200_000 {
            std::hint::black_box(read(std::hint::black_box(line)));
        }
        println!("{name}: {} ns a line of {} bytes", began.elapsed().as_nanos() / 200_000, line.len());
    }
}
