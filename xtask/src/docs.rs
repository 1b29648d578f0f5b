//! The commands in the documents, run as a reader would run them.
//!
//! In a page, a block opened with ```` ```yaml file=NAME ```` (or another
//! language) becomes a file, and in a block opened with ```` ```console ```` the
//! lines that begin with `$ ` are commands. They run in order in a folder of
//! the page's own, against one control plane for all pages. Each must end with
//! 0, or the last one of a block with `exit=CODE` with that code. The other
//! lines of the block show what a reader may expect and are not compared.

use crate::control::{Control, Scratch};
use crate::proc::{command, target};
use crate::suite::Count;
use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Folders whose pages are run, in this order.
const FOLDERS: [&str; 2] = ["docs/user", "docs/admin"];

/// Nodes of the control plane behind the pages.
const NODES: u32 = 2;

/// Seconds that one command may take.
const PATIENCE: &str = "600";

/// Something that a page makes a reader do.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Write a file.
    Write { name: String, text: String },
    /// Run a command.
    Run { line: usize, command: String, exit: i32 },
}

/// Runs every page.
pub fn run(binary: &Path) -> Result<Count> {
    let scratch = target()?.join("docs");
    if scratch.join("pages").exists() {
        std::fs::remove_dir_all(scratch.join("pages"))?;
    }
    let _control = Scratch::start(Control::fresh(binary.to_owned(), &scratch.join("home"))?, NODES)?;
    let mut count = Count::default();
    for page in pages()? {
        let steps = steps(&std::fs::read_to_string(&page)?);
        if !steps.iter().any(|step| matches!(step, Step::Run { .. })) {
            continue;
        }
        let name = page.with_extension("").file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        println!("{}", page.display());
        count += run_page(&page, &steps, binary, &scratch.join("pages").join(name), &scratch.join("home"))?;
    }
    Ok(count)
}

fn pages() -> Result<Vec<PathBuf>> {
    let mut pages = Vec::new();
    for folder in FOLDERS {
        let mut here = Vec::new();
        for entry in std::fs::read_dir(folder).with_context(|| folder.to_owned())? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "md") {
                here.push(path);
            }
        }
        here.sort();
        pages.extend(here);
    }
    Ok(pages)
}

/// Runs one page in a folder of its own; after the first failure its other commands would mean nothing.
fn run_page(page: &Path, steps: &[Step], binary: &Path, folder: &Path, home: &Path) -> Result<Count> {
    std::fs::create_dir_all(folder)?;
    let beside = binary.parent().unwrap_or(Path::new(""));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(beside.to_owned()).chain(std::env::split_paths(&path)))?;
    let mut count = Count::default();
    for step in steps {
        match step {
            Step::Write { name, text } => {
                let file = folder.join(name);
                std::fs::create_dir_all(file.parent().unwrap_or(folder))?;
                std::fs::write(file, text)?;
            }
            Step::Run { line, command: typed, exit } => {
                let mut shell = command("timeout");
                shell.args([PATIENCE, "bash", "-c", typed]).current_dir(folder).stdin(Stdio::null());
                shell.env("AVIFLOW_HOME", home.canonicalize()?).env("PATH", &path).env_remove("AVIFLOW_CONTEXT");
                let out = shell.output().context("timeout")?;
                let ok = out.status.code() == Some(*exit);
                println!("  {} $ {typed}", if ok { "ok    " } else { "FAILED" });
                count += Count::one(ok);
                if !ok {
                    let said = [out.stdout, out.stderr].concat();
                    println!(
                        "{}:{line}: {}, not {exit}:\n{}",
                        page.display(),
                        out.status,
                        String::from_utf8_lossy(&said)
                    );
                    break;
                }
            }
        }
    }
    Ok(count)
}

/// What a page makes a reader do.
fn steps(text: &str) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((_, line)) = lines.next() {
        let Some(info) = line.strip_prefix("```") else { continue };
        let body: Vec<(usize, &str)> = lines.by_ref().take_while(|(_, line)| !line.starts_with("```")).collect();
        let mut words = info.split_whitespace();
        let language = words.next().unwrap_or_default();
        let value = |key: &str| info.split_whitespace().find_map(|w| w.strip_prefix(key)?.strip_prefix('='));
        if let Some(name) = value("file") {
            let text = body.iter().map(|(_, line)| format!("{line}\n")).collect();
            steps.push(Step::Write { name: name.to_owned(), text });
        } else if language == "console" {
            let from = steps.len();
            let mut open = false;
            for (number, line) in body {
                let typed = line.strip_prefix("$ ");
                if let (true, Some(Step::Run { command, .. })) = (open, steps.last_mut()) {
                    command.push('\n');
                    command.push_str(line.strip_prefix("> ").unwrap_or(line));
                } else if let Some(typed) = typed {
                    steps.push(Step::Run { line: number + 1, command: typed.to_owned(), exit: 0 });
                }
                open = (open || typed.is_some()) && line.ends_with('\\');
            }
            if let (Some(code), true) = (value("exit").and_then(|code| code.parse().ok()), steps.len() > from)
                && let Some(Step::Run { exit, .. }) = steps.last_mut()
            {
                *exit = code;
            }
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_files_and_commands() {
        let page = "# A page\n```yaml file=a.yaml\nname: a\n```\n```console\n$ one \\\n>  more\nshown\n$ two\n```\n\
                    ```console exit=2\n$ three\n```\n```sh\n$ not this\n```\n";
        let run = |line, command: &str, exit| Step::Run { line, command: command.to_owned(), exit };
        let expected = [
            Step::Write { name: "a.yaml".to_owned(), text: "name: a\n".to_owned() },
            run(6, "one \\\n more", 0),
            run(9, "two", 0),
            run(12, "three", 2),
        ];
        assert_eq!(steps(page), expected);
    }
}
