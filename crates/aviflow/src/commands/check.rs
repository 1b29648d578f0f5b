//! `node check`, and the test that it runs where nobody names another.

use super::App;
use super::exec::write;
use crate::cli::CheckArgs;
use crate::client::lost;
use crate::error::{Failure, Result};
use crate::output::print;
use aviflow_api::rest::{ExecFrame, NodeCheck};
use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// `aviflow node check`
pub fn check(app: &App, args: CheckArgs) -> Result<()> {
    let client = app.client()?;
    let (node, keep_cordoned) = (args.node, args.keep_cordoned);
    let check = NodeCheck { image: args.image, run: args.command, keep_cordoned, reason: args.why.reason };
    for frame in client.check_node(&node, &check)? {
        match frame? {
            ExecFrame::Stdout { data } => write(&mut std::io::stdout().lock(), &data)?,
            ExecFrame::Stderr { data } => write(&mut std::io::stderr().lock(), &data)?,
            ExecFrame::Exit { code: 0 } => {
                let open = client.node(&node)?;
                let takes = match open.closed {
                    Some(why) => format!("stays closed to new work by the cluster: {why}"),
                    None if keep_cordoned => format!("stays cordoned; `aviflow node uncordon {node}` opens it"),
                    None => "takes work again".to_owned(),
                };
                print(&format!("{node} passed its check and {takes}\n"));
                return Ok(());
            }
            ExecFrame::Exit { code } => {
                return Err(Failure::new(format!(
                    "{node} did not pass its check (exit code {code}), and stays cordoned"
                ))
                .help(format!("mend it and check it again; `aviflow node uncordon {node}` opens it without a check")));
            }
            ExecFrame::Failed { reason } => {
                return Err(Failure::new(format!("the check of {node} did not come to an end: {reason}"))
                    .help(format!("it stays cordoned; check it again, or `aviflow node uncordon {node}`")));
            }
        }
    }
    Err(lost("it ended before the check"))
}

/// Bytes that are written to the disk.
const WRITTEN: usize = 64 << 20;

/// The time in which an address must be reached.
const REACH: Duration = Duration::from_secs(5);

/// `aviflow node-probe`: what can be told of a node in a moment from a container with all of its GPUs.
///
/// It tells a node that runs containers, sees its GPUs, has a disk and reaches the control plane from one that does not;
/// it measures nothing. Bandwidth, memory errors and heat are for an image with the tools of the GPUs' maker.
pub fn probe(gpus: u32, reach: &[SocketAddr], virtual_gpus: bool) -> ExitCode {
    let mut good = true;
    let mut say = |passed: std::result::Result<String, String>| {
        let (mark, text) = match passed {
            Ok(text) => ("✓", text),
            Err(text) => {
                good = false;
                ("✗", text)
            }
        };
        print(&format!("{mark} {text}\n"));
    };
    say(if virtual_gpus { Ok(format!("{gpus} virtual GPUs: nothing to see")) } else { see_gpus(gpus) });
    say(shared_memory());
    say(disk());
    for address in reach {
        say(match TcpStream::connect_timeout(address, REACH) {
            Ok(_) => Ok(format!("the control plane is reached at {address}")),
            Err(e) => Err(format!("the control plane is not reached at {address}: {e}")),
        });
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Counts the GPUs: as their driver does, else as the container was told.
fn see_gpus(wanted: u32) -> std::result::Result<String, String> {
    let query = ["--query-gpu=index,uuid,name,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"];
    let (how, seen) = match Command::new("nvidia-smi").args(query).output() {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            print(&text);
            ("nvidia-smi", text.lines().filter(|line| !line.trim().is_empty()).count())
        }
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
            return Err(format!("nvidia-smi fails ({}): {}", output.status, why.trim()));
        }
        Err(_) => match std::env::var("NVIDIA_VISIBLE_DEVICES")
            .ok()
            .filter(|v| !matches!(v.as_str(), "" | "void" | "none" | "all"))
        {
            Some(list) => ("NVIDIA_VISIBLE_DEVICES", list.split(',').count()),
            None => ("/dev", devices(Path::new("/dev"))),
        },
    };
    let found = format!("{seen} of {wanted} GPUs are seen by {how}");
    if seen == wanted as usize { Ok(found) } else { Err(found) }
}

/// Device files of GPUs: `nvidia0`, `nvidia1`, ….
fn devices(folder: &Path) -> usize {
    let names =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.file_name().to_string_lossy().into_owned());
    let gpu = |name: &String| {
        name.strip_prefix("nvidia").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    names.filter(gpu).count()
}

fn shared_memory() -> std::result::Result<String, String> {
    let path = Path::new("/dev/shm").join(format!("aviflow-probe-{}", std::process::id()));
    let written = fs::write(&path, [0; 4096]);
    let _ = fs::remove_file(&path);
    match written {
        Ok(()) => Ok("shared memory can be written".to_owned()),
        Err(e) => Err(format!("shared memory cannot be written: {e}")),
    }
}

fn disk() -> std::result::Result<String, String> {
    let path = std::env::temp_dir().join(format!("aviflow-probe-{}", std::process::id()));
    let began = Instant::now();
    let write = || {
        let mut file = fs::File::create(&path)?;
        file.write_all(&vec![0x5A; WRITTEN])?;
        file.sync_all()?;
        let whole = fs::read(&path)?;
        if whole.len() == WRITTEN && whole.iter().all(|b| *b == 0x5A) {
            Ok(())
        } else {
            Err(std::io::ErrorKind::InvalidData.into())
        }
    };
    let written: std::io::Result<()> = write();
    let _ = fs::remove_file(&path);
    match written {
        Ok(()) => Ok(format!(
            "{} MiB are written to disk and read again in {} ms",
            WRITTEN >> 20,
            began.elapsed().as_millis()
        )),
        Err(e) => Err(format!("{} cannot be written and read again: {e}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_the_devices_with_a_number() {
        let folder = tempfile::TempDir::new().unwrap();
        for name in ["nvidia0", "nvidia1", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(devices(folder.path()), 3);
        assert_eq!(devices(&folder.path().join("away")), 0);
    }
}
