//! Environments are built once, whole, and say what is wrong with them.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use aviflow_api::spec::ResolvedEnvironment;
use aviflow_local::LocalConfig;
use aviflow_local::environments::{Cancel, Environments, Outcome};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

/// A cache in a folder, with locks and wheels of the test's own and no index.
struct Cache {
    home: tempfile::TempDir,
}

impl Cache {
    fn new() -> Cache {
        let home = tempfile::tempdir().unwrap();
        for folder in ["objects", "wheels"] {
            fs::create_dir(home.path().join(folder)).unwrap();
        }
        Cache { home }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.home.path().join(name)
    }

    fn environments(&self) -> Environments {
        let objects = self.path("objects");
        let mut config =
            LocalConfig::new(self.home.path().to_owned(), Vec::new(), Arc::new(move |s| Ok(objects.join(s))));
        config.build_env = [("PIP_NO_INDEX", "1".into()), ("PIP_FIND_LINKS", self.path("wheels").into_os_string())]
            .map(|(n, v): (&str, std::ffi::OsString)| (n.into(), v))
            .to_vec();
        Environments::new(&config)
    }

    fn object(&self, text: &str) -> String {
        let sha256 = hex(text.as_bytes());
        fs::write(self.path("objects").join(&sha256), text).unwrap();
        sha256
    }

    /// Makes a wheel with one module and one program, and gives its line of a lock.
    fn wheel(&self, name: &str) -> String {
        let script = "import sys, zipfile; name, path = sys.argv[1:]; w = zipfile.ZipFile(path, 'w'); info = name + '-1.0.dist-info/'\n\
            w.writestr(name + '.py', 'def main():\\n import sys\\n print(\"' + name + '\", sys.prefix)\\n')\n\
            w.writestr(info + 'METADATA', 'Metadata-Version: 2.1\\nName: ' + name + '\\nVersion: 1.0\\n')\n\
            w.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n\
            w.writestr(info + 'entry_points.txt', '[console_scripts]\\nrun-' + name + ' = ' + name + ':main\\n')\n\
            w.writestr(info + 'RECORD', '')\nw.close()\n";
        let path = self.path("wheels").join(format!("{name}-1.0-py3-none-any.whl"));
        let made = Command::new("python3").args(["-c", script, name]).arg(&path).status().unwrap();
        assert!(made.success());
        format!("{name}==1.0 --hash=sha256:{}\n", hex(&fs::read(path).unwrap()))
    }

    fn environment(&self, hash: &str, locks: &[&str]) -> ResolvedEnvironment {
        ResolvedEnvironment {
            name: "test".to_owned(),
            version: 1,
            hash: hash.to_owned(),
            python: ">=3.8".to_owned(),
            locks: locks.iter().map(|text| self.object(text)).collect(),
            env: std::collections::BTreeMap::new(),
        }
    }

    fn build(&self, environment: &ResolvedEnvironment) -> Result<Outcome, String> {
        self.environments().build(environment, &Cancel::default(), &|_| {}).map_err(|e| e.to_string())
    }

    fn run(&self, program: &Path) -> String {
        let output = Command::new(program).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn an_empty_lock_needs_no_pip() {
    let cache = Cache::new();
    let environment = cache.environment("h", &["# nothing\n"]);
    assert_eq!(cache.environments().find("h"), None);
    assert_eq!(cache.build(&environment), Ok(Outcome::Built));
    assert_eq!(cache.build(&environment), Ok(Outcome::Found));
    let venv = cache.environments().find("h").unwrap();
    assert!(venv.join("bin/python").exists() && !venv.join("bin/pip").exists());
    let listed = cache.environments().list();
    assert_eq!(listed.len(), 1);
    assert!(listed[0].complete && listed[0].bytes > 0);
    assert_eq!(listed[0].name.as_deref(), Some("test@1"));
}

#[test]
fn half_built_is_built_again_and_never_used() {
    let cache = Cache::new();
    let folder = cache.path("environments/h");
    fs::create_dir_all(folder.join("bin")).unwrap();
    fs::write(folder.join("bin/python"), "half").unwrap();
    assert_eq!(cache.environments().find("h"), None);
    assert!(!cache.environments().list()[0].complete);
    assert_eq!(cache.build(&cache.environment("h", &[])), Ok(Outcome::Built));
    // Nor is one whose interpreter the machine does not have any more.
    let python = folder.join("bin/python");
    fs::remove_file(&python).unwrap();
    std::os::unix::fs::symlink("/nowhere/python", &python).unwrap();
    assert_eq!(cache.environments().find("h"), None);
    assert_eq!(cache.build(&cache.environment("h", &[])), Ok(Outcome::Built));
}

#[test]
fn builders_at_once_build_once() {
    let cache = Cache::new();
    let environment = cache.environment("h", &[""]);
    let spec = serde_json::to_string(&environment).unwrap();
    let other = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aviflow-local-helper"));
        command.arg("build").arg(cache.home.path()).arg(&spec).stdout(Stdio::piped()).spawn().unwrap()
    };
    let processes = [other(), other()];
    let mut outcomes = std::thread::scope(|scope| {
        let threads = [0, 1].map(|_| scope.spawn(|| cache.build(&environment).unwrap()));
        threads.map(|t| format!("{:?}", t.join().unwrap())).to_vec()
    });
    for process in processes {
        outcomes.push(String::from_utf8(process.wait_with_output().unwrap().stdout).unwrap().trim().to_owned());
    }
    outcomes.sort();
    assert_eq!(outcomes, ["Built", "Found", "Found", "Found"]);
}

#[test]
fn what_the_control_plane_is_told_is_not_told_to_pip() {
    let cache = Cache::new();
    let (folder, seen) = (cache.path("bin"), cache.path("seen"));
    fs::create_dir(&folder).unwrap();
    // It says that it is the interpreter, and writes down what each step is given.
    let fake = folder.join("python3");
    let real = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    let real = String::from_utf8(real.stdout).unwrap();
    let script = format!(
        "#!/bin/sh\nif [ \"$2\" = -c ]; then echo 3.12.0; echo {}; exit; fi\nenv > {}\nexec {} \"$@\"\n",
        fake.display(),
        seen.display(),
        real.trim()
    );
    fs::write(&fake, script).unwrap();
    fs::set_permissions(&fake, <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let built = Command::new(env!("CARGO_BIN_EXE_aviflow-local-helper"))
        .arg("build")
        .arg(cache.home.path())
        .arg(serde_json::to_string(&cache.environment("h", &[""])).unwrap())
        .env("PATH", path)
        .env("AVIFLOW_STORE", "postgres://aviflow:secret@db/aviflow")
        .env("PIP_INDEX_URL", "https://index.example/simple")
        .status()
        .unwrap();
    assert!(built.success());
    let seen = fs::read_to_string(seen).unwrap();
    assert!(seen.contains("PIP_INDEX_URL=https://index.example/simple"), "{seen}");
    assert!(!seen.contains("AVIFLOW_") && !seen.contains("secret"), "{seen}");
}

#[test]
fn packages_are_installed_with_progress() {
    let cache = Cache::new();
    let lock = format!("{}{}", cache.wheel("alpha"), cache.wheel("beta"));
    let environment = cache.environment("h", &[&lock]);
    let told = Mutex::new(Vec::new());
    let progress = |p| told.lock().unwrap().push(p);
    let outcome = cache.environments().build(&environment, &Cancel::default(), &progress);
    assert_eq!(outcome, Ok(Outcome::Built));
    let told = told.into_inner().unwrap();
    assert!(told.iter().all(|p| p.hash == "h" && p.name == "test@1"));
    let steps: Vec<_> = told.iter().map(|p| (p.step.as_str(), p.done, p.total)).collect();
    assert!(steps.contains(&("collecting alpha 1.0", 1, 2)), "{steps:?}");
    assert_eq!(steps.last(), Some(&("installing 2 packages", 2, 2)));
    let venv = cache.environments().find("h").unwrap();
    assert_eq!(cache.run(&venv.join("bin/run-alpha")), format!("alpha {}", venv.display()));
}

#[test]
fn layers_share_what_is_beneath() {
    let cache = Cache::new();
    let (lower, upper) = (cache.wheel("lower"), cache.wheel("upper"));
    for hash in ["one", "two"] {
        // The same content beneath, each with requirements of its own.
        let own = format!("# {hash}\n{upper}");
        assert_eq!(cache.build(&cache.environment(hash, &[&lower, &own])), Ok(Outcome::Built));
        let venv = cache.environments().find(hash).unwrap();
        for program in ["lower", "upper"] {
            let said = cache.run(&venv.join(format!("bin/run-{program}")));
            assert_eq!(said, format!("{program} {}", venv.display()), "run by the upper interpreter");
        }
        let both = Command::new(venv.join("bin/python")).args(["-c", "import lower, upper"]).status().unwrap();
        assert!(both.success());
    }
    let names: Vec<String> = cache.environments().list().into_iter().map(|e| e.hash).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    // Without what is beneath it, a layer is not complete.
    fs::remove_dir_all(cache.path("environments").join(&names[0])).unwrap();
    assert_eq!(cache.environments().find("one"), None);
    assert_eq!(cache.build(&cache.environment("one", &[&lower, &format!("# one\n{upper}")])), Ok(Outcome::Built));
}

#[test]
fn a_layer_uses_an_environment_that_is_there() {
    let cache = Cache::new();
    let (lower, upper) = (cache.wheel("lower"), cache.wheel("upper"));
    assert_eq!(cache.build(&cache.environment("plain", &[&lower])), Ok(Outcome::Built));
    assert_eq!(cache.build(&cache.environment("layered", &[&lower, &upper])), Ok(Outcome::Built));
    let names: Vec<String> = cache.environments().list().into_iter().map(|e| e.hash).collect();
    assert_eq!(names, ["layered", "plain"]);
}

#[test]
fn failures_name_the_package_and_can_be_tried_again() {
    let cache = Cache::new();
    let good = cache.wheel("alpha");
    let wrong_hash = format!("alpha==1.0 --hash=sha256:{}\n", "0".repeat(64));
    let missing = format!("absent-package==9.9 --hash=sha256:{}\n", "0".repeat(64));
    let cases = [
        (wrong_hash.as_str(), "package alpha==1.0 is not what was locked"),
        (missing.as_str(), "package absent-package==9.9 is not to be had for this machine"),
        ("alpha==1.0\n", "has no hash"),
    ];
    for (lock, part) in cases {
        let error = cache.build(&cache.environment("h", &[lock])).expect_err(part);
        assert!(error.starts_with("environment test@1 could not be built: ") && error.contains(part), "{error}");
        assert!(!cache.path("environments/h").exists());
    }
    assert_eq!(cache.build(&cache.environment("h", &[&good])), Ok(Outcome::Built));
    let mut unfit = cache.environment("other", &[&good]);
    unfit.python = ">=3.99".to_owned();
    let error = cache.build(&unfit).expect_err("no such Python");
    assert!(error.contains("it needs Python >=3.99, and PATH has"), "{error}");
}

#[test]
fn a_cancelled_build_ends_with_its_processes() {
    let cache = Cache::new();
    // An interpreter that begins a step and never ends it.
    let fake = cache.path("python");
    let script = "#!/bin/sh\nif [ \"$3\" != -c ]; then exec python3 \"$@\"; fi\n\
        exec python3 -I -u -c 'import os, threading\n\
def end():\n while os.read(0, 1): pass\n os.killpg(0, 9)\n\
threading.Thread(target=end, daemon=True).start()\nprint(\"begun\")\nthreading.Event().wait()'\n";
    fs::write(&fake, script).unwrap();
    let mode = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755);
    fs::set_permissions(&fake, mode).unwrap();
    let objects = cache.path("objects");
    let mut config = LocalConfig::new(cache.home.path().to_owned(), Vec::new(), Arc::new(move |s| Ok(objects.join(s))));
    config.python = Some(fake);
    let environments = Environments::new(&config);
    let (cancel, environment) = (Cancel::default(), cache.environment("h", &[]));
    // Told before the step begins: whichever comes first, the build ends.
    let progress = |_| cancel.cancel();
    let error = environments.build(&environment, &cancel, &progress).expect_err("cancelled");
    assert_eq!(error.reason, "the control plane stopped");
    assert_eq!(environments.find("h"), None);
}
