//! `cp`: outputs and checkpoints of a job to this machine.

use super::App;
use crate::cli::CpArgs;
use crate::error::{Failure, Result, While};
use crate::output::print;
use crate::render::number::{bytes, count};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// `aviflow cp`
pub fn cp(app: &App, args: &CpArgs) -> Result<()> {
    let (job, path) = parse(&args.source)?;
    let target = target(path, &args.destination)?;
    let client = app.client()?;
    let archive = client.files(job, path)?;
    let (files, size) = receive(archive, path, &target)?;
    let what = count(files, "file");
    print(&format!(
        "copied {job}:{path} from {} to {} ({what}, {})\n",
        client.context(),
        target.display(),
        bytes(size)
    ));
    Ok(())
}

fn parse(source: &str) -> Result<(&str, &str)> {
    match source.split_once(':') {
        Some((job, path)) if !job.is_empty() && path.starts_with('/') => Ok((job, path)),
        _ => Err(Failure::usage(format!("`{source}` is not JOB:PATH"))
            .help("write it as `tiny-gpt:/out`; `aviflow show JOB` names a job's outputs")),
    }
}

/// As `cp` does: a folder that exists gets the copy inside it.
fn target(path: &str, destination: &Path) -> Result<PathBuf> {
    let name = Path::new(path).file_name();
    let target = match name {
        Some(name) if destination.is_dir() => destination.join(name),
        _ => destination.to_owned(),
    };
    if target.symlink_metadata().is_ok() {
        return Err(Failure::new(format!("{} is there already", target.display()))
            .help("remove it, or name another destination"));
    }
    Ok(target)
}

/// Unpacks beside the target and renames, so that it is there whole or not at all.
fn receive(archive: impl Read, path: &str, target: &Path) -> Result<(u64, u64)> {
    let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let cannot = || format!("{} cannot be written", target.display());
    let folder = tempfile::Builder::new().prefix(".aviflow-cp-").tempdir_in(parent).or_fail(cannot)?;
    let mut tar = tar::Archive::new(archive);
    tar.set_preserve_permissions(false);
    let (mut files, mut size) = (0, 0);
    for entry in tar.entries().or_fail(cannot)? {
        let mut entry = entry.or_fail(|| "the copy broke off".to_owned())?;
        let unpacked = entry.unpack_in(folder.path()).or_fail(cannot)?;
        if unpacked && entry.header().entry_type().is_file() {
            files += 1;
            size += entry.header().size().unwrap_or(0);
        }
    }
    // One thing of the asked name is that thing; anything else is the content of the folder.
    let name = Path::new(path).file_name().map(|n| folder.path().join(n)).filter(|p| p.symlink_metadata().is_ok());
    let only = fs::read_dir(folder.path()).or_fail(cannot)?.count() == 1;
    let from = name.filter(|_| only).unwrap_or_else(|| folder.path().to_owned());
    fs::rename(&from, target).or_fail(cannot)?;
    Ok((files, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(names: &[&str]) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for name in names {
            let mut header = tar::Header::new_gnu();
            header.set_size(3);
            header.set_mode(0o644);
            tar.append_data(&mut header, name, &b"abc"[..]).expect("append");
        }
        tar.into_inner().expect("archive")
    }

    #[test]
    fn a_file_and_a_folder_become_the_target() {
        let folder = tempfile::tempdir().expect("folder");
        let at = |name: &str| folder.path().join(name);
        assert_eq!(receive(archive(&["model.bin"]).as_slice(), "/out/model.bin", &at("m")), Ok((1, 3)));
        assert_eq!(fs::read(at("m")).expect("file"), b"abc");
        assert_eq!(receive(archive(&["out/a", "out/b/c"]).as_slice(), "/out", &at("o")), Ok((2, 6)));
        assert!(at("o/b/c").is_file());
        assert_eq!(receive(archive(&["a", "b/c"]).as_slice(), "/out", &at("p")), Ok((2, 6)));
        assert!(at("p/b/c").is_file());
        assert_eq!(fs::read_dir(folder.path()).expect("folder").count(), 3, "nothing is left behind");
    }

    #[test]
    fn nothing_that_is_there_is_overwritten() {
        let folder = tempfile::tempdir().expect("folder");
        assert_eq!(target("/out", folder.path()), Ok(folder.path().join("out")));
        fs::write(folder.path().join("out"), "").expect("write");
        assert!(target("/out", folder.path()).is_err());
        assert_eq!(parse("a:/b"), Ok(("a", "/b")));
        for wrong in ["a", "a:b", ":/b", ""] {
            assert_eq!(parse(wrong).expect_err("wrong").code, 2);
        }
    }
}
