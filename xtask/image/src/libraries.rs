//! The shared libraries that a program is linked to, as the dynamic linker of this machine finds them.

use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where they are, the dynamic linker among them, sorted; none of a static program.
///
/// # Errors
/// If `ldd` cannot be run, or the linker does not find one of them.
pub fn of(program: &Path) -> Result<Vec<PathBuf>> {
    let out = Command::new("ldd").arg(program).env("LC_ALL", "C").output().context("`ldd` could not be started")?;
    let (said, error) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    if !out.status.success() {
        // Its words for a program of which there is nothing to say.
        if format!("{said}{error}").contains("not a dynamic executable") {
            return Ok(Vec::new());
        }
        bail!("`ldd {}` failed ({}): {}", program.display(), out.status, error.trim());
    }
    parse(&said).with_context(|| format!("the libraries of {}", program.display()))
}

/// Reads what `ldd` says: `NAME => PATH (ADDRESS)`, or `PATH (ADDRESS)` of the linker itself.
fn parse(said: &str) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for line in said.lines().map(str::trim) {
        let (name, place) = line.split_once(" => ").unwrap_or((line, line));
        if place == "not found" {
            bail!("{name} is not on this machine");
        }
        let path = place.rsplit_once(" (").map_or(place, |(path, _)| path);
        // The kernel's own library is no file, and a static program says so in words.
        if path.starts_with('/') {
            paths.push(PathBuf::from(path));
        }
    }
    paths.sort();
    paths.dedup();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ldd_says_is_understood() {
        let said = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f01)\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f02)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f03)\n";
        let expected =
            ["/lib/x86_64-linux-gnu/libc.so.6", "/lib/x86_64-linux-gnu/libm.so.6", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(parse(said).unwrap(), expected.map(PathBuf::from));
        assert_eq!(parse("\tstatically linked\n").unwrap(), Vec::<PathBuf>::new());
        let error = parse("\tlibx.so.1 => not found\n").unwrap_err();
        assert!(error.to_string().contains("libx.so.1"), "{error}");
    }

    #[test]
    fn a_program_of_this_machine_has_its_linker() {
        let own = of(&std::env::current_exe().unwrap()).unwrap();
        assert!(own.iter().any(|path| path.to_string_lossy().contains("/ld")), "{own:?}");
        assert!(own.iter().all(|path| path.is_file()), "{own:?}");
    }
}
