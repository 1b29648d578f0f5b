use super::*;
use crate::hooks::Phase;
use crate::wiring::tests::spec;
use std::fs;
use std::os::unix::ffi::OsStringExt;

/// Waits until the thread says a word, and gives what it said before.
fn until(watch: &mut Watch, word: &Seen) -> Vec<Seen> {
    let (mut all, mut said) = (Vec::new(), false);
    while !said {
        let mut poll = Poll::default();
        watch.watch(&mut poll);
        poll.wait(None);
        watch.read(&poll, |seen| if seen == *word { said = true } else { all.push(seen) });
    }
    all
}

fn places(epoch: u32, folder: &Path, alone: bool) -> Places {
    Places {
        epoch,
        checkpoints: Some(folder.join("checkpoints")),
        events: vec![folder.to_owned()],
        disks: vec![],
        mark: ("m".to_owned(), 4),
        alone,
        gpus: 1,
    }
}

#[test]
fn what_a_training_leaves_at_its_end_is_seen_and_what_was_there_before_is_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut watch = Watch::start().expect("a thread");
    assert!(!watch.last_look(), "no epoch has begun");
    for (epoch, alone) in [(1, true), (2, false)] {
        watch.begin(places(epoch, folder.path(), alone));
        assert_eq!(until(&mut watch, &Seen::Ready), []);
        let new = folder.path().join(format!("checkpoints/checkpoint-{epoch}"));
        fs::create_dir_all(&new).expect("a folder");
        fs::write(new.join("model.safetensors"), "weights").expect("written");
        let state = format!("{{\n  \"global_step\": {epoch},\n  \"x\": 1\n}}\n");
        fs::write(new.join("trainer_state.json"), state).expect("written");
        assert!(watch.last_look());
        let path = new.to_string_lossy().into_owned();
        let step = u64::from(epoch);
        let seen = until(&mut watch, &Seen::Last).into_iter().map(|seen| match seen {
            Seen::Checkpoint(Sighting { phase, step, path, .. }) => (phase, step, path),
            other => panic!("{other:?}"),
        });
        let seen: Vec<_> = seen.collect();
        let (complete, begin) = ((Phase::Complete, step, path.clone()), (Phase::Begin, step, path));
        // It may have been seen to begin; where others may write, it is, and a moment without changes is waited for.
        assert!(seen == [begin, complete.clone()] || alone && seen == [complete], "{seen:?}");
        watch.end();
        assert!(!watch.last_look());
    }
}

#[test]
fn a_file_that_is_renamed_is_told_from_one_that_is_written_in_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let listing = || list::list(folder.path()).expect("a listing");
    let mut seen = Checkpoints::new(1);
    seen.look(&listing(), 0, false);
    fs::write(folder.path().join("step_1.pt"), "in place").expect("written");
    fs::write(folder.path().join("step_2.pt.tmp"), "to be renamed").expect("written");
    assert_eq!(seen.look(&listing(), 1, true).len(), 1, "the temporary one has begun");
    fs::rename(folder.path().join("step_2.pt.tmp"), folder.path().join("step_2.pt")).expect("renamed");
    let complete = seen.look(&listing(), 2, true);
    let [Sighting { phase: Phase::Complete, step: 2, path, changed }] = complete.as_slice() else {
        panic!("{complete:?}")
    };
    let node = &listing()[1];
    assert_eq!((path.as_str(), *changed), ("step_2.pt", node.changed));
    assert!(node.changed >= node.modified && node.changed > 1_700_000_000_000_000_000);
}

#[test]
fn a_folder_is_listed_without_links_and_with_the_text_that_tells() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::create_dir_all(at("a/b")).expect("a folder");
    fs::write(at("a/latest"), "global_step5").expect("written");
    fs::write(at("a/b/large"), vec![b'x'; 10_000]).expect("written");
    let state = format!("{{{}}}", " ".repeat(9_998));
    fs::write(at("a/trainer_state.json"), &state).expect("written");
    std::os::unix::fs::symlink("a", at("link")).expect("a link");
    std::os::unix::net::UnixListener::bind(at("socket")).expect("a socket");
    fs::write(at("a").join(OsString::from_vec(vec![b'x', 0xff])), "").expect("written");
    let listing = list::list(folder.path()).expect("a listing");
    let [a] = listing.as_slice() else { panic!("{listing:?}") };
    let inside = a.inside.as_ref().expect("a folder");
    let names: Vec<(&str, u64)> = inside.iter().map(|node| (node.name.as_str(), node.size)).collect();
    assert_eq!(names, [("b", 0), ("latest", 12), ("trainer_state.json", 10_000)]);
    assert_eq!(inside[1].text, Some((b"global_step5".to_vec(), b"global_step5".to_vec())));
    let (first, last) = inside[2].text.clone().expect("its text");
    assert_eq!((first.len(), last.len(), last.last()), (4096, 64, Some(&b'}')));
    assert_eq!(list::list(&at("nowhere")), Some(vec![]));
    assert_eq!(list::list(&at("a/latest")), None);
}

#[test]
fn what_cannot_be_read_now_voids_the_whole_look() {
    // No error is as easily had, also by root: a path that is longer than the 4095 bytes that the kernel takes.
    let folder = tempfile::tempdir().expect("a folder");
    let outer = folder.path().join("a");
    let mut deep = outer.clone();
    while deep.as_os_str().len() < 3649 {
        deep.push("x".repeat(249));
    }
    deep.push("x".repeat(3899 - deep.as_os_str().len()));
    for inside in ["checkpoint-1", "lost+found/checkpoint-2"] {
        fs::create_dir_all(deep.join(inside)).expect("a folder");
    }
    fs::write(deep.join("latest"), "global_step5").expect("written");
    // The names that are listed where all above is so much longer.
    let listed = |longer: usize| {
        let long = folder.path().join("a".repeat(1 + longer));
        fs::rename(&outer, &long).expect("renamed");
        let seen = list::list(&long.join(deep.strip_prefix(&outer).expect("below")));
        fs::rename(&long, &outer).expect("renamed");
        seen.map(|list| list.into_iter().map(|node| node.name).collect::<Vec<_>>())
    };
    let names = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect());
    assert_eq!(listed(1), names(&["checkpoint-1", "latest", "lost+found"]));
    assert_eq!(listed(184), None, "the first of them is hidden");
    fs::remove_dir(deep.join("checkpoint-1")).expect("removed");
    assert_eq!(listed(184), names(&["latest", "lost+found"]), "what a file system keeps for itself is not looked into");
}

#[test]
fn too_large_a_folder_is_left() {
    let folder = tempfile::tempdir().expect("a folder");
    for n in 0..=list::MOST {
        fs::File::create(folder.path().join(n.to_string())).expect("a file");
    }
    assert_eq!(list::list(folder.path()), None);
}

#[test]
fn event_files_of_the_worker_s_processes_are_followed() {
    let folder = tempfile::tempdir().expect("a folder");
    let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
    let event = crate::tensorboard::sample();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join("runs/x").join(name.replace("HOST", host.trim()));
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(&path, bytes).expect("written");
    };
    let mut files = EventFiles::new(vec![folder.path().to_owned()], "mark".into(), 4);
    let look = |files: &mut EventFiles, now| {
        let mut seen = Vec::new();
        files.look(now, |one| {
            if let Seen::Scalars { rank, step, .. } = one {
                seen.push((rank, step));
            }
        });
        seen
    };
    write("events.out.tfevents.1.HOST.1.0", &event);
    assert_eq!(look(&mut files, 0), [], "it was there before");
    // A process that carries the mark, and one that does not.
    let marked = |mark: &str| {
        let mut command = std::process::Command::new("sleep");
        command.arg("1000").env(crate::protocol::MARK, mark).env("AVIFLOW_RANK", "6").spawn().expect("a process")
    };
    let (mut ours, mut other) = (marked("mark"), marked("another"));
    write(&format!("events.out.tfevents.2.HOST.{}.0", ours.id()), &event[..event.len() - 1]);
    write(&format!("events.out.tfevents.2.HOST.{}.0", other.id()), &event);
    write("events.out.tfevents.2.elsewhere.77.0", &event);
    write("events.out.tfevents.2.HOST", &event);
    assert_eq!(look(&mut files, 1), [(6, 10), (6, 20)], "up to the last whole record");
    write(&format!("events.out.tfevents.2.HOST.{}.0", ours.id()), &event);
    assert_eq!(look(&mut files, 2), [(6, 30)]);
    assert_eq!(look(&mut files, 3), []);
    // One that breaks is never read again.
    write(&format!("events.out.tfevents.2.HOST.{}.0", ours.id()), &[&event[..], &[7; 99]].concat());
    assert_eq!(look(&mut files, 4), []);
    assert_eq!(look(&mut files, 20_000), []);
    for child in [&mut ours, &mut other] {
        child.kill().and_then(|()| child.wait()).expect("gone");
    }
    // Of those that look alike, it takes those that its own processes write: that are gone; and that have them open.
    let mut files = EventFiles::new(vec![folder.path().to_owned()], "mark".into(), 4);
    assert_eq!(look(&mut files, 0), []);
    assert_eq!(look(&mut files, 1), []);
    files.add(vec![(5, 4_000_001)]);
    write("events.out.tfevents.3.HOST.4000001.0", &event);
    write("events.out.tfevents.3.HOST.4000002.0", &event);
    write("events.out.tfevents.3.HOST", &event);
    write("events.out.tfevents.4.HOST", &event[..0]);
    let open = folder.path().join(format!("runs/x/events.out.tfevents.4.{}", host.trim()));
    let mut script = std::process::Command::new("bash");
    script.args(["-c", r#"exec 5>>"$0"; echo open; sleep 1000 & wait"#]).arg(&open).env(crate::protocol::MARK, "mark");
    let mut writer = script.env("AVIFLOW_RANK", "7").stdout(std::process::Stdio::piped()).spawn().expect("bash");
    io::BufRead::read_line(&mut io::BufReader::new(writer.stdout.take().expect("a pipe")), &mut String::new())
        .expect("a line");
    fs::write(&open, &event).expect("written");
    assert_eq!(look(&mut files, 2), [], "they are searched for now and then");
    files.search_soon();
    let mut seen = look(&mut files, 3);
    seen.sort_unstable();
    assert_eq!(seen, [(5, 10), (5, 20), (5, 30), (7, 10), (7, 20), (7, 30)]);
    for process in crate::sweep::below(writer.id().cast_signed()).0 {
        crate::sys::kill(process.pid, libc::SIGKILL);
    }
    writer.kill().and_then(|()| writer.wait()).expect("gone");
}

#[test]
fn places_are_those_of_the_variables() {
    let mut spec = spec();
    spec.cwd = "/code".into();
    let environment = [
        ("AVIFLOW_CHECKPOINT_DIR", "/ckpt"),
        ("AVIFLOW_OUTPUT_DIR", "/out"),
        ("AVIFLOW_OUTPUT_0", "/out"),
        ("AVIFLOW_OUTPUT_1", "/more"),
        ("TENSORBOARD_LOGGING_DIR", "runs"),
        ("TENSORBOARD_DIR", ""),
    ];
    let environment = environment.map(|(name, value)| (OsString::from(name), OsString::from(value))).into();
    let of = |spec: &WorkerSpec| Places::of(spec, 3, "m", &environment);
    let expected = ["/code/runs", "/out", "/more", "/code", "/ckpt"].map(PathBuf::from);
    assert_eq!(
        (of(&spec).events, of(&spec).checkpoints),
        (expected.to_vec(), None),
        "worker 1 does not look for checkpoints"
    );
    let disks = ["/ckpt", "/out", "/more", "/dev/shm"].map(PathBuf::from);
    assert_eq!(of(&spec).disks, disks, "every worker looks whether they are full");
    (spec.worker, spec.workers) = (0, 1);
    assert_eq!((of(&spec).checkpoints, of(&spec).alone, of(&spec).gpus), (Some("/ckpt".into()), true, 4));
}
