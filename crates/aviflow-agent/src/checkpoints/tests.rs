//! Saves as the tools carry them out, cut after each of their file operations.

use super::*;

/// An operation on a file, as a training's processes do it. Paths are below the folder that is listed.
#[derive(Clone, Copy)]
enum Op {
    Mkdir(&'static str),
    /// Opens it, which empties it.
    Open(&'static str),
    /// Adds bytes.
    Write(&'static str, &'static str),
    Rename(&'static str, &'static str),
    Remove(&'static str),
}
use Op::{Mkdir, Open, Remove, Rename, Write};

/// The end of what `torch.save` writes.
const END: &str = "PK\u{5}\u{6}\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// A file system in memory. Each operation takes a second, and so does each look.
#[derive(Clone, Default)]
struct Disk {
    root: Node,
    text: BTreeMap<u64, String>,
    now: i64,
    inodes: u64,
}

impl Disk {
    fn new() -> Self {
        Self { root: Node { inside: Some(vec![]), ..Node::default() }, ..Self::default() }
    }

    fn folder(&mut self, path: &str) -> &mut Node {
        let mut at = &mut self.root;
        for part in path.split('/').rev().skip(1).collect::<Vec<_>>().into_iter().rev() {
            at = at.inside.as_mut().unwrap().iter_mut().find(|node| node.name == part).expect(path);
        }
        at
    }

    fn put(&mut self, path: &str, inside: Option<Vec<Node>>) {
        self.inodes += 1;
        let (now, inode) = (self.now, self.inodes);
        let name = path.rsplit('/').next().unwrap().to_owned();
        let folder = self.folder(path);
        (folder.modified, folder.changed) = (now, now);
        let list = folder.inside.as_mut().unwrap();
        list.push(Node { name, modified: now, changed: now, inode, inside, ..Node::default() });
        list.sort_by(|a, b| a.name.cmp(&b.name));
    }

    fn take(&mut self, path: &str) -> Option<Node> {
        let (now, name) = (self.now, path.rsplit('/').next().unwrap().to_owned());
        let folder = self.folder(path);
        let list = folder.inside.as_mut().unwrap();
        let at = list.iter().position(|node| node.name == name)?;
        (folder.modified, folder.changed) = (now, now);
        Some(list.remove(at))
    }

    fn run(&mut self, op: Op) {
        self.now += 1_000_000_000;
        match op {
            Mkdir(path) => self.put(path, Some(vec![])),
            Open(path) => {
                self.take(path);
                self.put(path, None);
            }
            Write(path, text) => {
                let (now, name) = (self.now, path.rsplit('/').next().unwrap().to_owned());
                let node = self.folder(path).inside.as_mut().unwrap().iter_mut().find(|n| n.name == name).expect(path);
                (node.modified, node.changed) = (now, now);
                node.size += text.len() as u64;
                let inode = node.inode;
                self.text.entry(inode).or_default().push_str(text);
            }
            Rename(from, to) => {
                let mut node = self.take(from).expect(from);
                self.take(to);
                node.changed = self.now;
                node.name = to.rsplit('/').next().unwrap().to_owned();
                self.put(to, None);
                self.take(to);
                let folder = self.folder(to).inside.as_mut().unwrap();
                folder.push(node);
                folder.sort_by(|a, b| a.name.cmp(&b.name));
            }
            Remove(path) => drop(self.take(path)),
        }
    }

    fn listing(&self) -> Vec<Node> {
        let mut list = self.root.inside.clone().unwrap();
        self.fill(&mut list);
        list
    }

    fn fill(&self, list: &mut [Node]) {
        for node in list {
            if wanted(&node.name).is_some() {
                let text = self.text.get(&node.inode).cloned().unwrap_or_default().into_bytes();
                node.text = Some((text.clone(), text));
            }
            self.fill(node.inside.as_deref_mut().unwrap_or_default());
        }
    }
}

fn shown(sightings: &[Sighting]) -> Vec<String> {
    let word = |s: &Sighting| {
        let phase = match s.phase {
            Phase::Begin => "begin",
            Phase::Complete => "complete",
            Phase::Failed => "failed",
        };
        format!("{phase} {} {}", s.step, s.path)
    };
    sightings.iter().map(word).collect()
}

/// Runs operations with a look after each; then nothing happens for long. What was seen.
fn watch(disk: &mut Disk, seen: &mut Checkpoints, ops: &[Op], quiet_for: u64) -> Vec<String> {
    let mut sightings = Vec::new();
    for op in ops {
        disk.run(*op);
        sightings.extend(seen.look(&disk.listing(), disk.now as u64 / 1_000_000, false));
    }
    for _ in 0..quiet_for {
        disk.now += 1_000_000_000;
        sightings.extend(seen.look(&disk.listing(), disk.now as u64 / 1_000_000, false));
    }
    shown(&sightings)
}

/// `setup` was there before. `save` is cut after each of its operations but the last `harmless` ones, and is then
/// never complete, however long one waits; whole, it is complete once, at the path.
fn check(gpus: u32, setup: &[Op], save: &[Op], harmless: usize, complete: &str) {
    for cut in 0..=save.len() {
        let (mut disk, mut seen) = (Disk::new(), Checkpoints::new(gpus));
        setup.iter().for_each(|op| disk.run(*op));
        assert_eq!(seen.look(&disk.listing(), 0, false), []);
        let seen = watch(&mut disk, &mut seen, &save[..cut], 200);
        let completed: Vec<&String> = seen.iter().filter(|s| s.starts_with("complete")).collect();
        if cut + harmless >= save.len() {
            assert_eq!(completed, [&format!("complete {complete}")], "cut after {cut}: {seen:?}");
        } else {
            assert!(completed.is_empty(), "cut after {cut}: {seen:?}");
        }
        // A worker that was started anew has no memory of it.
        let mut later = Checkpoints::new(gpus);
        assert_eq!(later.look(&disk.listing(), 0, false), [], "told again");
    }
}

#[test]
fn torch_distributed_checkpoint() {
    check(
        4,
        &[Mkdir("checkpoint")],
        &[
            Mkdir("checkpoint/step-100"),
            Open("checkpoint/step-100/__0_0.distcp"),
            Open("checkpoint/step-100/__1_0.distcp"),
            Write("checkpoint/step-100/__0_0.distcp", "weights"),
            Write("checkpoint/step-100/__1_0.distcp", "weights"),
            Open("checkpoint/step-100/.metadata.tmp"),
            Write("checkpoint/step-100/.metadata.tmp", "pickle"),
            Write("checkpoint/step-100/.metadata.tmp", "."),
            Rename("checkpoint/step-100/.metadata.tmp", "checkpoint/step-100/.metadata"),
        ],
        0,
        "100 checkpoint/step-100",
    );
    // Before 2.3.
    check(
        4,
        &[],
        &[
            Mkdir("step_7"),
            Open("step_7/__0_0.distcp"),
            Write("step_7/__0_0.distcp", "weights"),
            Open("step_7/.metadata"),
            Write("step_7/.metadata", "pick"),
            Write("step_7/.metadata", "le."),
        ],
        0,
        "7 step_7",
    );
}

#[test]
fn what_was_away_for_a_while_is_not_new() {
    let save = [
        Mkdir("step_7"),
        Open("step_7/__0_0.distcp"),
        Write("step_7/__0_0.distcp", "weights"),
        Open("step_7/.metadata"),
        Write("step_7/.metadata", "pickle."),
    ];
    let (mut disk, mut seen) = (Disk::new(), Checkpoints::new(1));
    save.iter().for_each(|op| disk.run(*op));
    assert_eq!(seen.look(&disk.listing(), 0, false), [], "it was there before");
    assert_eq!(seen.look(&[], 10_000, false), [], "its mount is away");
    assert_eq!(seen.look(&disk.listing(), 20_000, false), []);
    // One that was removed and is written again is.
    let removed = [Remove("step_7/__0_0.distcp"), Remove("step_7/.metadata"), Remove("step_7")];
    assert_eq!(
        watch(&mut disk, &mut seen, &[&removed[..], &save].concat(), 100).last().map(String::as_str),
        Some("complete 7 step_7")
    );
}

#[test]
fn a_folder_that_is_written_again_is_not_complete_meanwhile() {
    check(
        2,
        &[
            Mkdir("step-5"),
            Open("step-5/__0_0.distcp"),
            Write("step-5/__0_0.distcp", "old"),
            Open("step-5/.metadata"),
            Write("step-5/.metadata", "old."),
            Open("other"),
            Open("other"),
        ],
        &[
            Open("step-5/__0_0.distcp"),
            Write("step-5/__0_0.distcp", "new"),
            Open("step-5/.metadata.tmp"),
            Write("step-5/.metadata.tmp", "new."),
            Remove("step-5/.metadata"),
            Rename("step-5/.metadata.tmp", "step-5/.metadata"),
        ],
        0,
        "5 step-5",
    );
}

#[test]
fn several_folders_of_a_step_are_complete_together() {
    check(
        2,
        &[],
        &[
            Mkdir("step-9"),
            Mkdir("step-9/model"),
            Open("step-9/model/__0_0.distcp"),
            Mkdir("step-9/optim"),
            Open("step-9/optim/__0_0.distcp"),
            Open("step-9/model/.metadata"),
            Write("step-9/model/.metadata", "m."),
            Open("step-9/optim/.metadata"),
            Write("step-9/optim/.metadata", "o."),
        ],
        0,
        "9 step-9",
    );
}

#[test]
fn megatron() {
    let before = [
        Mkdir("iter_0000100"),
        Open("iter_0000100/common.pt"),
        Open("latest_checkpointed_iteration.txt"),
        Write("latest_checkpointed_iteration.txt", "100"),
    ];
    // `torch_dist`: a checkpoint of torch.distributed with more.
    check(
        8,
        &before,
        &[
            Mkdir("iter_0000200"),
            Open("iter_0000200/common.pt"),
            Write("iter_0000200/common.pt", "common"),
            Open("iter_0000200/__0_0.distcp"),
            Write("iter_0000200/__0_0.distcp", "weights"),
            Open("iter_0000200/.metadata.tmp"),
            Write("iter_0000200/.metadata.tmp", "."),
            Rename("iter_0000200/.metadata.tmp", "iter_0000200/.metadata"),
            Open("iter_0000200/metadata.json"),
            Write("iter_0000200/metadata.json", "{}"),
            Open("latest_checkpointed_iteration.txt"),
            Write("latest_checkpointed_iteration.txt", "200"),
        ],
        0,
        "200 iter_0000200",
    );
    // `torch`.
    check(
        8,
        &before,
        &[
            Mkdir("iter_0000300"),
            Mkdir("iter_0000300/mp_rank_00"),
            Open("iter_0000300/mp_rank_00/model_optim_rng.pt"),
            Write("iter_0000300/mp_rank_00/model_optim_rng.pt", "weights"),
            Open("latest_checkpointed_iteration.txt"),
            Write("latest_checkpointed_iteration.txt", "300"),
        ],
        0,
        "300 iter_0000300",
    );
}

const STATE_500: &str =
    "{\n  \"epoch\": 1.0,\n  \"global_step\": 500,\n  \"log_history\": [\n    {\n      \"loss\": 1.0\n    }\n";

#[test]
fn trainer() {
    let save = [
        Mkdir("out/checkpoint-500"),
        Open("out/checkpoint-500/config.json"),
        Write("out/checkpoint-500/config.json", "{}"),
        Open("out/checkpoint-500/model-00001-of-00002.safetensors"),
        Write("out/checkpoint-500/model-00001-of-00002.safetensors", "weights"),
        Open("out/checkpoint-500/model-00002-of-00002.safetensors"),
        Write("out/checkpoint-500/model-00002-of-00002.safetensors", "weights"),
        Open("out/checkpoint-500/model.safetensors.index.json"),
        Write("out/checkpoint-500/model.safetensors.index.json", "{}"),
        Open("out/checkpoint-500/optimizer.pt"),
        Write("out/checkpoint-500/optimizer.pt", "moments"),
        Open("out/checkpoint-500/scheduler.pt"),
        Write("out/checkpoint-500/scheduler.pt", "rates"),
        Open("out/checkpoint-500/rng_state_0.pth"),
        Write("out/checkpoint-500/rng_state_0.pth", END),
        Open("out/checkpoint-500/trainer_state.json"),
        Write("out/checkpoint-500/trainer_state.json", STATE_500),
        Write("out/checkpoint-500/trainer_state.json", "  ]\n}\n"),
    ];
    check(2, &[Mkdir("out")], &save, 0, "500 out/checkpoint-500");
    // Another rank writes its state after the main process is through.
    let (mut disk, mut seen) = (Disk::new(), Checkpoints::new(2));
    disk.run(Mkdir("out"));
    seen.look(&disk.listing(), 0, false);
    watch(&mut disk, &mut seen, &save, 0);
    // It may die in the midst of it.
    let half = [Open("out/checkpoint-500/rng_state_1.pth"), Write("out/checkpoint-500/rng_state_1.pth", "random")];
    assert_eq!(watch(&mut disk, &mut seen, &half, 200), ["x"; 0]);
    assert_eq!(seen.look(&disk.listing(), u64::MAX, true), []);
    let late = [Write("out/checkpoint-500/rng_state_1.pth", END)];
    assert_eq!(watch(&mut disk, &mut seen, &late, 0), ["x"; 0]);
    assert_eq!(watch(&mut disk, &mut seen, &[], 3), ["complete 500 out/checkpoint-500"]);
}

#[test]
fn a_trainer_that_renames() {
    check(
        2,
        &[Mkdir("out")],
        &[
            Mkdir("out/tmp-checkpoint-500"),
            Open("out/tmp-checkpoint-500/adapter_model.safetensors"),
            Write("out/tmp-checkpoint-500/adapter_model.safetensors", "weights"),
            Open("out/tmp-checkpoint-500/trainer_state.json"),
            Write("out/tmp-checkpoint-500/trainer_state.json", STATE_500),
            Write("out/tmp-checkpoint-500/trainer_state.json", "  ]\n}\n"),
            Rename("out/tmp-checkpoint-500", "out/checkpoint-500"),
        ],
        0,
        "500 out/checkpoint-500",
    );
}

#[test]
fn deepspeed() {
    let before = [Mkdir("global_step50"), Open("latest"), Write("latest", "global_step50")];
    // Rank 1 is slow: rank 0 writes `latest` before it has begun.
    let save = [
        Mkdir("global_step100"),
        Open("global_step100/mp_rank_00_model_states.pt"),
        Write("global_step100/mp_rank_00_model_states.pt", "weights"),
        Write("global_step100/mp_rank_00_model_states.pt", END),
        Open("global_step100/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        Write("global_step100/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "moments"),
        Write("global_step100/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", END),
        Open("latest"),
        Write("latest", "global_step100"),
        Open("global_step100/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        Write("global_step100/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "moments"),
        Write("global_step100/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", END),
    ];
    for cut in 0..=save.len() {
        let (mut disk, mut seen) = (Disk::new(), Checkpoints::new(2));
        before.iter().for_each(|op| disk.run(*op));
        seen.look(&disk.listing(), 0, false);
        let mut told = watch(&mut disk, &mut seen, &save[..cut], 100);
        // All processes are gone.
        told.extend(shown(&seen.look(&disk.listing(), disk.now as u64 / 1_000_000, true)));
        let complete = told.iter().filter(|s| s.starts_with("complete 100")).count();
        assert_eq!(complete, usize::from(cut == save.len()), "{cut}: {told:?}");
    }
    let (mut disk, mut seen) = (Disk::new(), Checkpoints::new(8));
    seen.look(&disk.listing(), 0, false);
    assert_eq!(watch(&mut disk, &mut seen, &save, 200), ["begin 100 global_step100"], "8 ranks, and 2 parts");
}

#[test]
fn renames() {
    // A file, and one of which the temporary name was never seen; a folder.
    check(
        1,
        &[],
        &[Open("ckpt_100.pt.tmp"), Write("ckpt_100.pt.tmp", "weights"), Rename("ckpt_100.pt.tmp", "ckpt_100.pt")],
        0,
        "100 ckpt_100.pt",
    );
    check(
        1,
        &[],
        &[
            Mkdir(".tmp-step-30"),
            Open(".tmp-step-30/weights"),
            Write(".tmp-step-30/weights", "weights"),
            Rename(".tmp-step-30", "step-30"),
        ],
        0,
        "30 step-30",
    );
    // Orbax.
    check(
        1,
        &[Mkdir("run")],
        &[
            Mkdir("run/40.orbax-checkpoint-tmp-1"),
            Open("run/40.orbax-checkpoint-tmp-1/a"),
            Write("run/40.orbax-checkpoint-tmp-1/a", "weights"),
            Rename("run/40.orbax-checkpoint-tmp-1", "run/40"),
        ],
        0,
        "40 run/40",
    );
}

#[test]
fn the_removal_of_an_old_one_tells_nothing() {
    let save = [
        Mkdir("step-1"),
        Open("step-1/__0_0.distcp"),
        Write("step-1/__0_0.distcp", "x"),
        Open("step-1/__1_0.distcp"),
        Write("step-1/__1_0.distcp", "x"),
        Open("step-1/.metadata"),
        Write("step-1/.metadata", "."),
    ];
    let removal =
        [Remove("step-1/__0_0.distcp"), Remove("step-1/__1_0.distcp"), Remove("step-1/.metadata"), Remove("step-1")];
    // Of this epoch, and of one before.
    for before in [false, true] {
        let (mut disk, mut seen) = (Disk::new(), Checkpoints::new(2));
        if !before {
            seen.look(&disk.listing(), 0, false);
        }
        save.iter().for_each(|op| disk.run(*op));
        let told = shown(&seen.look(&disk.listing(), disk.now as u64 / 1_000_000, false));
        assert_eq!(told.len(), usize::from(!before), "{told:?}");
        assert_eq!(watch(&mut disk, &mut seen, &removal, 5), ["x"; 0]);
    }
}

#[test]
fn what_is_written_in_place_is_never_complete() {
    let ops = [
        Open("ckpt_100.pt"),
        Write("ckpt_100.pt", "weights"),
        Mkdir("step-3"),
        Open("step-3/w"),
        Write("step-3/w", "x"),
    ];
    let (mut disk, mut seen) = (Disk::new(), Checkpoints::new(1));
    seen.look(&disk.listing(), 0, false);
    assert_eq!(watch(&mut disk, &mut seen, &ops, 100), ["x"; 0]);
}

#[test]
fn of_a_step_in_several_files_none_is_complete_alone() {
    let (mut disk, mut seen) = (Disk::new(), Checkpoints::new(1));
    seen.look(&disk.listing(), 0, false);
    let first = [
        Open("model_step8.pt.tmp"),
        Write("model_step8.pt.tmp", "x"),
        Open("optim_step8.pt.tmp"),
        Rename("model_step8.pt.tmp", "model_step8.pt"),
    ];
    let told = watch(&mut disk, &mut seen, &first, 200);
    assert!(!told.iter().any(|told| told.starts_with("complete")), "{told:?}");
    let second = [Write("optim_step8.pt.tmp", "x"), Rename("optim_step8.pt.tmp", "optim_step8.pt")];
    let told = watch(&mut disk, &mut seen, &second, 200);
    let complete: Vec<&String> = told.iter().filter(|told| told.starts_with("complete")).collect();
    assert_eq!(complete, ["complete 8 model_step8.pt", "complete 8 optim_step8.pt"]);
}

#[test]
fn a_save_that_is_given_up_failed() {
    let (mut disk, mut seen) = (Disk::new(), Checkpoints::new(1));
    seen.look(&disk.listing(), 0, false);
    let ops = [Open("step_8.pt.tmp"), Write("step_8.pt.tmp", "x"), Remove("step_8.pt.tmp")];
    assert_eq!(watch(&mut disk, &mut seen, &ops, 0), ["begin 8 step_8.pt.tmp", "failed 8 step_8.pt.tmp"]);
}

#[test]
fn at_the_end_nobody_is_waited_for() {
    let (mut disk, mut seen) = (Disk::new(), Checkpoints::new(1));
    seen.look(&disk.listing(), 0, false);
    let ops = [Open("step_8.pt.tmp"), Write("step_8.pt.tmp", "x"), Rename("step_8.pt.tmp", "step_8.pt")];
    ops.iter().for_each(|op| disk.run(*op));
    assert_eq!(shown(&seen.look(&disk.listing(), 1, true)), ["complete 8 step_8.pt"]);
    assert!(!seen.is_settling());
}

#[test]
fn steps_in_names() {
    for (name, step) in [
        ("step-100", Some(100)),
        ("step_00000100", Some(100)),
        ("global_step5", Some(5)),
        ("iter_0000100", Some(100)),
        ("epoch=1-step=300.ckpt", Some(300)),
        ("checkpoint-7", Some(7)),
        ("ckpt.12.pt", Some(12)),
        ("1200", Some(1200)),
        ("epoch_3.pt", None),
        ("rng_state_3.pth", None),
        ("model-00001-of-00003.safetensors", None),
        ("step-99999999999999999999999", None),
        ("steps", None),
        ("", None),
        ("ünïcödé-step-4", Some(4)),
    ] {
        assert_eq!(name::step(name), step, "{name}");
    }
}
