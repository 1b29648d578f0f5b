use super::*;
use crate::checkpoints::Sighting;

fn metrics(step: u64) -> Message {
    Message::Metrics { step, values: BTreeMap::new(), total_steps: None, tokens: None }
}

/// Steps as (time, rank, step) and what is said, as short text.
fn check(best: Option<u64>, steps: &[(u64, u32, u64)], expected: &str) {
    let mut training = Training::new(best, 0);
    let mut said = Vec::new();
    for (now, rank, step) in steps {
        training.flush(*now, false, &mut said);
        training.hook(*rank, metrics(*step), *now, &mut said);
    }
    training.flush(u64::MAX, true, &mut said);
    let words: Vec<String> = said
        .iter()
        .map(|s| match s {
            Said::Progress(rank, at, p) => format!("{rank}:{}@{at}", p.step),
            Said::Event(Event::FirstStep { step }) => format!("first {step}"),
            Said::Event(Event::CaughtUp { step }) => format!("caught {step}"),
            Said::Event(other) => format!("{other:?}"),
            Said::Earlier(at, other) => format!("{other:?}@{at}"),
            Said::Note(text) => text.clone(),
            Said::Sign(at, sign) => format!("{sign:?}@{at}"),
        })
        .collect();
    assert_eq!(words.join(", "), expected);
}

#[test]
fn first_step_and_catching_up_are_said_once() {
    check(None, &[(0, 0, 1), (500, 0, 2)], "0:1@0, first 1, 0:2@500");
    check(Some(2), &[(0, 0, 1), (500, 0, 2), (900, 0, 3)], "0:1@0, first 1, 0:2@500, 0:3@900, caught 3");
    check(Some(2), &[(0, 0, 9), (500, 1, 10)], "0:9@0, first 9, caught 9, 1:10@500");
}

#[test]
fn progress_is_limited_and_the_newest_kept() {
    check(None, &[(0, 0, 1), (10, 0, 2), (20, 0, 3), (20, 1, 3)], "0:1@0, first 1, 1:3@20, 0:3@20");
    check(None, &[(0, 0, 1), (10, 0, 2), (110, 0, 3)], "0:1@0, first 1, 0:2@10, 0:3@110");
}

fn facts<const N: usize>(values: [(&str, &str); N]) -> Said {
    Said::Event(Event::Facts { values: values.map(|(n, v)| (n.to_owned(), v.to_owned())).into() })
}

#[test]
fn a_checkpoint_and_a_fact_are_said_once() {
    let mut training = Training::default();
    let mut said = Vec::new();
    for _rank in 0..8 {
        let message = Message::Checkpoint { phase: Phase::Complete, step: 5, path: "/c".into() };
        training.hook(0, message, 0, &mut said);
        training.hook(0, Message::Data { name: "d".into(), sha256: "a".into(), bytes: None }, 0, &mut said);
        training.hook(0, Message::Summary { values: [("loss".to_owned(), 2.5.into())].into() }, 0, &mut said);
    }
    training.flush(1, true, &mut said);
    let complete = Said::Event(Event::CheckpointComplete { step: 5, path: "/c".into() });
    assert_eq!(said, [complete, facts([("data.d", "a")]), facts([("result.loss", "2.5")])]);
}

#[test]
fn facts_that_change_at_every_step_are_said_once_a_second_and_the_newest_kept() {
    let mut training = Training::default();
    let mut said = Vec::new();
    for now in 0..=2500 {
        training.flush(now, false, &mut said);
        let values = [("step".to_owned(), now.into()), (format!("at.{}", now / 1000), now.into())].into();
        training.hook(0, Message::Facts { values }, now, &mut said);
    }
    assert_eq!(training.due(), Some(3000));
    training.flush(2501, true, &mut said);
    assert_eq!(training.due(), None);
    let expected = [
        facts([("at.0", "0"), ("step", "0")]),
        facts([("at.0", "999"), ("step", "999")]),
        facts([("at.1", "1999"), ("step", "1999")]),
        facts([("at.2", "2500"), ("step", "2500")]),
    ];
    assert_eq!(said, expected);
}

#[test]
fn the_platform_s_own_facts_are_not_the_training_s_to_tell() {
    let mut training = Training::default();
    let mut said = Vec::new();
    let values = [(format!("{OWN_FACTS}hash"), "00".into()), ("own".to_owned(), "1".into())].into();
    training.hook(0, Message::Facts { values }, 0, &mut said);
    assert_eq!(said, [facts([("own", "1")])]);
}

#[test]
fn facts_without_end_are_refused_with_a_word() {
    let mut training = Training::default();
    let mut said = Vec::new();
    for n in 0..10_000 {
        let values = [(format!("name.{n}"), "\u{1}".repeat(1000).into())].into();
        training.hook(0, Message::Facts { values }, 0, &mut said);
    }
    training.hook(0, Message::Facts { values: [("name.0".to_owned(), "short".into())].into() }, 0, &mut said);
    training.flush(0, true, &mut said);
    let notes = said.iter().filter(|s| matches!(s, Said::Note(_))).count();
    assert_eq!((notes, said.len()), (1, 3));
    let Some(Said::Event(event @ Event::Facts { values })) = said.last() else { panic!("{said:?}") };
    assert_eq!(values["name.0"], "short", "a known fact may still change");
    assert!(serde_json::to_vec(event).is_ok_and(|bytes| bytes.len() < crate::protocol::MAX_LINE - 1024));
}

#[test]
fn output_is_read_until_a_hook_speaks() {
    let mut training = Training::default();
    let mut said = Vec::new();
    let line = |seen| Line { speaker: None, seen };
    let values = || line(Seen::Values(None, BTreeMap::new()));
    training.output(0, values(), 0, &mut said);
    assert_eq!(said, []);
    training.output(0, line(Seen::Bar(50, 500)), 0, &mut said);
    training.output(0, values(), 0, &mut said);
    assert_eq!(training.last_step(0), Some(50));
    training.hook(0, metrics(60), 0, &mut said);
    training.output(0, line(Seen::Step(Progress { step: 99, ..Progress::default() })), 0, &mut said);
    assert_eq!(training.highest_step(), Some(60));
}

fn line(text: &str) -> Line {
    crate::output::read(text).expect(text)
}

/// Progress as (rank, step, values), in order.
fn progress(said: &[Said]) -> Vec<(u32, u64, Vec<String>)> {
    let of = |said: &Said| match said {
        Said::Progress(rank, _, p) => Some((*rank, p.clone())),
        Said::Event(_) | Said::Earlier(..) | Said::Note(_) | Said::Sign(..) => None,
    };
    said.iter().filter_map(of).map(|(rank, p)| (rank, p.step, p.values.into_keys().collect())).collect()
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn a_dictionary_has_the_step_of_the_bar_that_follows_it() {
    let mut training = Training::default();
    let mut said = Vec::new();
    let report = "{'loss': 2.5, 'epoch': 0.1}";
    // Standard output is read first: the bar of step 10 comes after its values.
    for (now, text) in [
        (0, "  0%|          | 0/100 [00:00<?, ?it/s]"),
        (900, "  9%|▉         | 9/100 [00:09<01:31,  1.0it/s]"),
        (1000, report),
        (1000, "  9%|▉         | 9/100 [00:09<01:31,  1.0it/s]"),
        (1200, " 10%|█         | 10/100 [00:10<01:30,  1.0it/s]"),
        // An evaluation has a bar of its own, which starts anew.
        (2000, " 50%|█████     | 20/40 [00:10<00:10,  2.0it/s]"),
        (3000, "{'eval_loss': 3.0, 'eval_runtime': 3.2, 'epoch': 0.1}"),
        (4000, " 11%|█         | 11/100 [00:11<01:29,  1.0it/s]"),
        (5000, report),
    ] {
        training.flush(now, false, &mut said);
        training.output(0, line(text), now, &mut said);
    }
    assert_eq!(training.due(), Some(6000));
    training.flush(6000, false, &mut said);
    let values = || names(&["epoch", "loss"]);
    let expected = [(0, 10, values()), (0, 10, names(&["epoch", "eval_loss"])), (0, 11, vec![]), (0, 11, values())];
    assert_eq!(progress(&said), expected);
    assert_eq!(training.due(), None);
}

#[test]
fn a_dictionary_without_any_bar_is_no_step() {
    let mut training = Training::default();
    let mut said = Vec::new();
    training.output(0, line("{'loss': 2.5, 'epoch': 0.1}"), 0, &mut said);
    training.flush(1000, false, &mut said);
    assert_eq!((said, training.due()), (vec![], None));
}

#[test]
fn of_several_processes_behind_a_pipe_one_counts() {
    let mut training = Training::default();
    let mut said = Vec::new();
    for (now, text) in [
        (0, "[rank3]:step 1 loss 2.0"),
        (200, "[rank1]:step 1 loss 2.0"),
        (400, "[rank3]:step 2 loss 2.0"),
        (600, "[rank1]:step 3 loss 2.0"),
    ] {
        training.output(0, line(text), now, &mut said);
    }
    let steps: Vec<u64> = progress(&said).iter().map(|(_, step, _)| *step).collect();
    assert_eq!(steps, [1, 1, 3]);
}

#[test]
fn an_evaluation_is_no_step() {
    let mut training = Training::new(Some(5), 0);
    let mut said = Vec::new();
    training.output(0, line("step 0: train loss 4.2, val loss 4.4"), 0, &mut said);
    training.output(0, line("iter 80: val loss 4.4, val time: 1.00 ms"), 200, &mut said);
    assert_eq!((training.last_step(0), progress(&said).len(), said.len()), (None, 1, 1));
    training.output(0, line("step 3 loss 4.0"), 400, &mut said);
    training.output(0, line("step 3 val_loss 4.3"), 410, &mut said);
    training.output(0, line("step 900 val_loss 4.3"), 420, &mut said);
    training.flush(1000, true, &mut said);
    let steps: Vec<u64> = progress(&said).iter().map(|(_, step, _)| *step).collect();
    assert_eq!(steps, [0, 3, 3, 900]);
    assert_eq!(training.last_step(0), Some(3));
    assert!(!said.iter().any(|s| matches!(s, Said::Event(Event::CaughtUp { .. }))), "{said:?}");
}

#[test]
fn a_rate_of_one_gpu_is_told_for_the_job_too() {
    let mut training = Training::new(None, 16);
    let mut said = Vec::new();
    training.output(0, line("step:  1  loss: 2.0  memory: 1.0GiB(1.0%)  tps: 1,000  mfu: 1.00%"), 0, &mut said);
    let Some(Said::Progress(_, _, first)) = said.first() else { panic!("{said:?}") };
    assert_eq!(first.values["tokens_per_second"], Value::Number(16_000.0));
    assert_eq!(first.values["tokens_per_second_per_gpu"], Value::Number(1000.0));
}

#[test]
fn event_files_are_read_until_something_better_speaks() {
    let mut training = Training::default();
    let mut said = Vec::new();
    let loss = || [("loss".to_owned(), Value::Number(1.0))].into();
    training.scalars(0, 1, loss(), 0, &mut said);
    training.scalars(0, 2, [("eval_loss".to_owned(), Value::Number(1.0))].into(), 200, &mut said);
    assert_eq!((training.last_step(0), progress(&said).len()), (Some(1), 2));
    training.output(0, line("step 3 loss 2.0"), 400, &mut said);
    training.scalars(0, 9, loss(), 600, &mut said);
    assert_eq!(training.last_step(0), Some(3));
}

/// Sightings and steps at their times, in seconds: `begin 5`, `complete 5`, `failed 5`, `step 6`. What is said of checkpoints.
fn check_disk(script: &[(u64, &str, u64)], expected: &str) {
    let mut training = Training::default();
    let mut said = Vec::new();
    for (seconds, what, step) in script {
        let now = seconds * 1000;
        while let Some(due) = training.due().filter(|due| *due <= now) {
            training.flush(due, false, &mut said);
        }
        // Seen two seconds late.
        let (what, at) = what.strip_prefix("late ").map_or((*what, now), |what| (what, now - 2000));
        let mut see =
            |phase| training.sighted(Sighting { phase, step: *step, path: "/c".into(), changed: 0 }, at, &mut said);
        match what {
            "begin" => see(Phase::Begin),
            "complete" => see(Phase::Complete),
            "failed" => see(Phase::Failed),
            "hook" | "hook complete" | "hook failed" => {
                let phase = match what {
                    "hook" => Phase::Begin,
                    "hook complete" => Phase::Complete,
                    _ => Phase::Failed,
                };
                training.hook(0, Message::Checkpoint { phase, step: *step, path: "/c".into() }, now, &mut said);
            }
            // Time passes.
            "x" => {}
            _ => training.hook(0, metrics(*step), now, &mut said),
        }
    }
    let event = |event: &Event| match event {
        Event::CheckpointBegun { step } => Some(format!("begun {step}")),
        Event::CheckpointComplete { step, .. } => Some(format!("complete {step}")),
        Event::CheckpointGoesOn { step } => Some(format!("goes on {step}")),
        Event::CheckpointFailed { step } => Some(format!("failed {step}")),
        _ => None,
    };
    let word = |said: &Said| match said {
        Said::Event(one) => event(one),
        Said::Earlier(at, one) => event(one).map(|word| format!("{word}@{}", at / 1000)),
        Said::Progress(..) | Said::Note(_) | Said::Sign(..) => None,
    };
    assert_eq!(said.iter().filter_map(word).collect::<Vec<_>>().join(", "), expected, "{script:?}");
}

#[test]
fn a_training_that_stands_still_for_a_checkpoint_is_told_from_one_that_does_not() {
    // Short; long; and one whose step is printed after it.
    check_disk(&[(1, "step", 5), (3, "begin", 5), (6, "complete", 5)], "begun 5@3, complete 5@6");
    check_disk(
        &[(1, "step", 5), (3, "begin", 5), (40, "step", 5), (42, "late complete", 5)],
        "begun 5@3, complete 5@40",
    );
    check_disk(&[(3, "begin", 5), (7, "step", 5), (9, "late complete", 5)], "begun 5@3, complete 5@7");
    // In the background: the first time it is learned.
    check_disk(
        &[
            (1, "step", 5),
            (3, "begin", 5),
            (4, "step", 6),
            (5, "step", 7),
            (30, "complete", 5),
            (31, "begin", 9),
            (60, "complete", 9),
        ],
        "complete 5@30, complete 9@60",
    );
    check_disk(&[(3, "begin", 5), (4, "step", 6), (8, "late complete", 5), (9, "begin", 7)], "complete 5@6");
    // Without any step nothing speaks against it.
    check_disk(&[(3, "begin", 5), (14, "x", 0), (20, "complete", 5)], "begun 5@3, complete 5@20");
}

#[test]
fn a_checkpoint_that_was_given_up_is_over() {
    check_disk(&[(3, "begin", 5), (60, "failed", 5)], "begun 5@3, failed 5");
    check_disk(
        &[(3, "begin", 5), (60, "begin", 6), (61, "complete", 6)],
        "begun 5@3, failed 5, begun 6@60, complete 6@61",
    );
    check_disk(&[(3, "complete", 5), (9, "complete", 5)], "complete 5@3");
}

#[test]
fn what_is_seen_on_disk_counts_until_a_hook_speaks_of_a_checkpoint() {
    check_disk(
        &[(1, "complete", 1), (2, "hook", 2), (3, "begin", 2), (30, "complete", 2), (31, "x", 0)],
        "complete 1@1, begun 2@2",
    );
    check_disk(&[(1, "begin", 2), (2, "hook", 2), (30, "x", 0)], "begun 2@2");
}

#[test]
fn what_the_hooks_tell_of_a_checkpoint_is_no_word_on_whether_the_training_stands_still() {
    // Short, long, and failed.
    check_disk(&[(1, "step", 5), (3, "hook", 5), (6, "hook complete", 5)], "begun 5@3, complete 5");
    check_disk(&[(1, "step", 5), (3, "hook", 5), (40, "hook complete", 5)], "begun 5@3, complete 5");
    check_disk(&[(1, "step", 5), (3, "hook", 5), (6, "hook failed", 5)], "begun 5@3, failed 5");
    // Each rank tells it, and another may be a step further already.
    check_disk(
        &[(3, "hook", 5), (4, "hook", 5), (5, "step", 6), (6, "hook complete", 5), (7, "hook", 5), (20, "x", 0)],
        "begun 5@3, complete 5",
    );
    // In the background; the next one is looked at anew.
    check_disk(
        &[
            (1, "step", 5),
            (3, "hook", 5),
            (4, "step", 6),
            (30, "step", 7),
            (31, "hook complete", 5),
            (40, "hook", 7),
            (42, "hook complete", 7),
        ],
        "complete 5, begun 7@40, complete 7",
    );
}

#[test]
fn a_training_that_goes_on_while_its_checkpoint_is_written_does_not_stand_still() {
    // A part of the save is waited for, and the rest is written in the background.
    let staged = |last: &[(u64, &'static str, u64)]| {
        let first = [(1, "step", 4), (3, "step", 5), (4, "hook", 5), (20, "step", 6), (22, "step", 7), (24, "step", 8)];
        [&first[..], last].concat()
    };
    check_disk(&staged(&[(26, "step", 9), (60, "hook complete", 5)]), "begun 5@4, goes on 5@18, complete 5");
    // One that is never heard of again; that it failed nobody said.
    check_disk(&staged(&[(400, "step", 9), (500, "x", 0)]), "begun 5@4, goes on 5@18");
    check_disk(
        &staged(&[(400, "step", 9), (500, "hook", 9), (502, "hook complete", 9)]),
        "begun 5@4, goes on 5@18, begun 9@500, complete 9",
    );
    // On disk as well, where one step is enough after a while.
    check_disk(
        &[
            (1, "step", 4),
            (2, "step", 5),
            (3, "begin", 5),
            (20, "step", 6),
            (30, "x", 0),
            (90, "begin", 6),
            (99, "complete", 6),
        ],
        "begun 5@3, goes on 5@19, complete 6@99",
    );
}

#[test]
fn what_a_rank_does_and_its_collectives_are_told_as_they_are_now() {
    let mut training = Training::default();
    let mut said = Vec::new();
    training.hook(1, Message::Role { role: 3 }, 0, &mut said);
    for now in 0..=250 {
        training.flush(now, false, &mut said);
        training.hook(1, Message::Collective { number: now }, now, &mut said);
    }
    assert_eq!(training.due(), Some(300));
    training.flush(300, false, &mut said);
    assert_eq!(training.due(), None);
    let collective = |number| Said::Sign(number, Sign::Collective { rank: 1, number });
    let role = |at| Said::Sign(at, Sign::Role { rank: 1, role: 3 });
    assert_eq!(said, [role(0), collective(0), collective(99), collective(199), collective(250)]);
    // Who listens may be another by now.
    said.clear();
    for now in [1000, 59_999, 60_000, 61_000] {
        training.hook(1, metrics(now), now, &mut said);
    }
    let signs: Vec<&Said> = said.iter().filter(|said| matches!(said, Said::Sign(..))).collect();
    assert_eq!(signs, [&role(60_000)]);
}

#[test]
fn a_bar_does_not_hide_the_values_before_it() {
    let mut training = Training::default();
    let mut said = Vec::new();
    for (now, text) in [
        (0, "{'loss': 2.5}"),
        (10, " 10%|█ | 10/100 [00:10<01:30]"),
        (300, "{'loss': 2.4}"),
        (310, " 20%|█ | 20/100 [00:10<01:30]"),
        (320, " 22%|█ | 22/100 [00:10<01:30]"),
        (330, " 23%|█ | 23/100 [00:10<01:30]"),
    ] {
        training.flush(now, false, &mut said);
        training.output(0, line(text), now, &mut said);
    }
    training.flush(600, false, &mut said);
    let loss = || names(&["loss"]);
    // Steps are short here: the first bar is the one that was drawn with the values.
    assert_eq!(progress(&said), [(0, 10, loss()), (0, 20, loss()), (0, 23, vec![])]);
}
