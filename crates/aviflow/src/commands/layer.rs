//! `layer-fetch` and `layer-store`: what runs of Aviflow's own image in the pod that makes a layer, before and after
//! pip, see [`mod@aviflow_kube::layer`].

use super::depot::{Depot, Trouble, told, variable};
use aviflow_api::spec::Layer;
use aviflow_kube::layer::{AUTHORITY, ENDED, FOLDER, LARGEST, LAYER, LOCK, SAID, SCRIPT, TEXT};
use aviflow_local::archive;
use aviflow_local::environments::pip_failure;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// Fetches the lock, and lays out what installs it.
pub fn fetch(home: &Path) -> ExitCode {
    let fetch = || {
        fs::create_dir_all(home.join("home")).map_err(|e| disk(&e))?;
        fs::write(home.join(SCRIPT), TEXT).map_err(|e| disk(&e))?;
        depot()?.fetch(&format!("/lock/{}", layer()?.lock), "lock", &home.join(LOCK)).map(|_| ())
    };
    told(fetch())
}

/// Hands up what pip has installed, or says why it has not.
pub fn store(home: &Path) -> ExitCode {
    let store = || {
        let ended = fs::read_to_string(home.join(ENDED)).map_err(|e| disk(&e))?;
        if ended.trim() != "0" {
            let said = fs::read(home.join(SAID)).map_err(|e| disk(&e))?;
            return Err(Trouble::Lasting(why(&String::from_utf8_lossy(&said))));
        }
        let path = home.join("layer.tar");
        let (sha256, bytes) = File::create(&path)
            .and_then(|file| archive::pack(&home.join(FOLDER), io::BufWriter::new(file)))
            .map_err(|e| disk(&e))?;
        if bytes > LARGEST {
            return Err(Trouble::Lasting(format!(
                "its packages take {} MB, and {} MB is the most; put large packages into the image",
                bytes >> 20,
                LARGEST >> 20
            )));
        }
        depot()?.store(&format!("/layer/{}/{sha256}", layer()?.hash), "layer", &path)
    };
    told(store())
}

fn depot() -> Result<Depot, Trouble> {
    Depot::new(std::env::var(AUTHORITY).ok().as_deref())
}

fn layer() -> Result<Layer, Trouble> {
    serde_json::from_str(&variable(LAYER)?).map_err(|e| Trouble::Lasting(format!("the layer cannot be read: {e}")))
}

fn disk(e: &io::Error) -> Trouble {
    Trouble::Passing(format!("the volume of the pod cannot be read or written: {e}"))
}

/// Why pip did not install the packages.
fn why(said: &str) -> String {
    let lacks = |what: &str, package: &str| {
        format!(
            "the image's python3 has no {what}; use an image that has (on Debian and Ubuntu it is the package {package}), or install the packages where it is built"
        )
    };
    match said.trim_end().lines().last() {
        Some("AVIFLOW: no pip") => lacks("pip, and none comes with it", "python3-pip"),
        Some("AVIFLOW: no venv") => lacks("module venv", "python3-venv"),
        _ => pip_failure(said),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_kube::layer::installs;
    use std::process::Command;

    /// Makes a wheel of one module and one program.
    const WHEEL: &str = r#"
import sys, zipfile
wheel, info = zipfile.ZipFile(sys.argv[1] + "/tiny-1.0-py3-none-any.whl", "w"), "tiny-1.0.dist-info/"
wheel.writestr("tiny.py", "def main():\n print('from', __file__)\n")
wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
wheel.writestr(info + "entry_points.txt", "[console_scripts]\nrun-tiny = tiny:main\n")
for part in ("lib/libtiny.so", "share/tiny/words.txt"):
    wheel.writestr("tiny-1.0.data/data/" + part, part)
wheel.writestr(info + "RECORD", "")
wheel.close()
print(__import__("hashlib").sha256(open(wheel.filename, "rb").read()).hexdigest())
"#;

    fn printed(command: &mut Command) -> String {
        let output = command.output().expect("python3 runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    }

    #[test]
    fn a_layer_made_twice_is_the_same_and_runs_by_the_images_python() {
        let (home, wheels) = (tempfile::tempdir().expect("folder"), tempfile::tempdir().expect("folder"));
        let path = home.path().to_str().expect("a plain path");
        let hash = printed(Command::new("python3").args(["-c", WHEEL]).arg(wheels.path()));
        fs::write(home.path().join(LOCK), format!("tiny==1.0 --hash=sha256:{hash}\n")).expect("write");
        fs::write(home.path().join(SCRIPT), TEXT).expect("write");
        let make = |variable: &str| {
            let command = installs(path);
            let mut made = Command::new(&command[0]);
            // As an image may have it, for installations of its own.
            made.args(&command[1..]).env("PIP_NO_INDEX", "1").env("PIP_CONSTRAINT", "/not/there");
            printed(made.env(variable, wheels.path()));
            let ended = fs::read_to_string(home.path().join(ENDED)).expect("it ended");
            let said = fs::read_to_string(home.path().join(SAID)).expect("it spoke");
            (ended == "0").then(|| archive::hash(&home.path().join(FOLDER)).expect("a hash")).ok_or(said)
        };
        let refused = make("OTHER").expect_err("pip finds nothing");
        assert!(why(&refused).starts_with("package tiny==1.0 is not to be had"), "{refused}");
        let first = make("PIP_FIND_LINKS").expect("made");
        assert_eq!(make("PIP_FIND_LINKS"), Ok(first));
        let layer = home.path().join(FOLDER);
        fs::remove_dir_all(home.path().join("venv")).expect("it is not needed");
        let said = printed(Command::new(layer.join("bin/run-tiny")).env("PYTHONPATH", layer.join("site")));
        assert_eq!(said, format!("from {}", layer.join("site/tiny.py").display()));
        // Where they are as seen from the packages, which find them so.
        for part in ["lib/libtiny.so", "share/tiny/words.txt"] {
            let found = fs::read_to_string(layer.join("site/../../..").join(part)).expect("it was taken along");
            assert_eq!((found.as_str(), layer.join(part).is_file()), (part, true));
        }
        let again = home.path().join("again");
        archive::pack(&layer, File::create(home.path().join("tar")).expect("file")).expect("packed");
        aviflow_local::code::unpack("layer", &home.path().join("tar"), &again).expect("unpacked");
        assert!(again.join("site/tiny.py").is_file(), "in the job's pod");
    }

    #[test]
    fn a_failure_is_told_in_the_words_of_pip() {
        assert!(why("AVIFLOW: no pip\n").starts_with("the image's python3 has no pip, and none comes with it; use"));
        let said = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If\n    \
                    a==1 from http://index/a.whl (from -r /aviflow/lock.txt (line 1)):\n        \
                    Expected sha256 00\n             Got        11\n";
        let expected = "package a==1 is not what was locked: Expected sha256 00, Got        11; if";
        assert!(why(said).starts_with(expected), "{}", why(said));
    }
}
