//! What the kernel says of GPUs, memory and links: lines of `/dev/kmsg` as typed facts.
//!
//! [`read`] is pure; [`Kmsg`] reads the records that come. It judges nothing: which XID asks for what is decided
//! elsewhere. Texts are those of NVIDIA's driver (XID, SXID), of the kernel's killer, and of mlx5.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The longest text that a fact keeps, in bytes.
pub const LONGEST_TEXT: usize = 400;

/// Something that the kernel said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// When, in microseconds since the machine started; none if the line does not say.
    pub at_us: Option<u64>,
    /// What.
    pub what: What,
}

/// What it said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// An error of a GPU.
    Xid {
        /// The GPU's place, such as `0000:3b:00`: domain, bus and device in lower case, without the function.
        pci: String,
        /// The number.
        code: u32,
        /// The process that it happened to.
        pid: Option<u32>,
        /// What the driver wants done, of XID 154 alone.
        recovery: Option<Recovery>,
        /// What follows the number.
        text: String,
    },
    /// An error of an NVSwitch.
    SwitchXid {
        /// Its place.
        pci: String,
        /// The number.
        code: u32,
        /// Whether the driver calls it fatal.
        fatal: bool,
        /// What follows the number.
        text: String,
    },
    /// The kernel killed a process for lack of memory.
    OomKill {
        /// The process.
        pid: u32,
        /// Its name.
        name: String,
        /// Whether a memory group was full, and not the machine.
        group: bool,
    },
    /// A network port went up or down.
    Link {
        /// The device's place, and the port's name where it has one.
        port: String,
        /// Whether it is up.
        up: bool,
    },
}

/// What the driver wants done with a GPU (XID 154).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recovery {
    /// Nothing.
    None,
    /// Reset the GPU.
    Reset,
    /// Restart the machine.
    Reboot,
    /// Let no peer use it, and wait.
    DrainPeers,
    /// Wait until nobody uses it, and reset it.
    DrainAndReset,
}

/// Reads one record of `/dev/kmsg`, or a line of `dmesg` or of a log.
#[must_use]
pub fn read(line: &str) -> Option<Fact> {
    let (at_us, text) = when(line);
    let what = xid(text).or_else(|| switch(text)).or_else(|| oom(text)).or_else(|| link(text))?;
    Some(Fact { at_us, what })
}

/// The time of `4,1234,5678901,-;text` or `[ 5678.901234] text`, and the text.
fn when(line: &str) -> (Option<u64>, &str) {
    let kmsg = line.split_once(';').and_then(|(head, text)| {
        let mut parts = head.split(',');
        parts.next()?.parse::<u32>().ok()?;
        parts.next()?.parse::<u64>().ok()?;
        Some((Some(parts.next()?.parse().ok()?), text))
    });
    let dmesg = || {
        let (time, text) = line.strip_prefix('[')?.split_once("] ")?;
        let (seconds, micros) = time.trim().split_once('.')?;
        let (seconds, micros): (u64, u64) = (seconds.parse().ok()?, micros.get(..6)?.parse().ok()?);
        Some((seconds.checked_mul(1_000_000).map(|us| us + micros), text))
    };
    kmsg.or_else(dmesg).unwrap_or((None, line))
}

/// `NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.`
fn xid(text: &str) -> Option<What> {
    let (pci, code, text) = place_and_code(text, "NVRM: Xid (")?;
    let mut rest = text;
    let mut pid = None;
    if let Some(value) = rest.strip_prefix("pid=") {
        let (value, after) = value.split_once(',').unwrap_or((value, ""));
        // `'<unknown>'` where there is none.
        pid = value.trim_matches('\'').parse().ok();
        rest = after.trim_start();
    }
    let recovery = (code == 154).then(|| recovery(rest)).flatten();
    Some(What::Xid { pci, code, pid, recovery, text: cut(rest) })
}

/// `nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)`
fn switch(text: &str) -> Option<What> {
    let (pci, code, text) = place_and_code(text, "SXid (")?;
    let fatal = text.get(..5).is_some_and(|word| word.eq_ignore_ascii_case("fatal"));
    Some(What::SwitchXid { pci, code, fatal, text: cut(text) })
}

fn place_and_code<'a>(text: &'a str, mark: &str) -> Option<(String, u32, &'a str)> {
    let rest = &text[text.find(mark)? + mark.len()..];
    let (place, rest) = rest.split_once(')')?;
    let pci = pci(place)?;
    let rest = rest.strip_prefix(':')?.trim_start();
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let code = rest[..digits].parse().ok()?;
    Some((pci, code, rest[digits..].trim_start_matches([',', ' '])))
}

/// A place as everybody writes it (`PCI:0000:3b:00`, `00000000:3B:00.0`), in one form; none if it is none.
#[must_use]
pub fn pci(place: &str) -> Option<String> {
    let place = place.trim().trim_start_matches("PCI:").to_ascii_lowercase();
    let place = place.split_once('.').map_or(place.as_str(), |(place, _)| place);
    let mut parts = place.split(':').map(|part| u32::from_str_radix(part, 16).ok());
    let (domain, bus, device) = (parts.next()??, parts.next()??, parts.next()??);
    parts.next().is_none().then(|| format!("{domain:04x}:{bus:02x}:{device:02x}"))
}

/// `GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)`
fn recovery(text: &str) -> Option<Recovery> {
    let rest = &text[text.rfind(" to 0x")? + " to 0x".len()..];
    let digits = rest.bytes().take_while(u8::is_ascii_hexdigit).count();
    match u32::from_str_radix(&rest[..digits], 16).ok()? {
        0 => Some(Recovery::None),
        1 => Some(Recovery::Reset),
        2 => Some(Recovery::Reboot),
        3 => Some(Recovery::DrainPeers),
        4 => Some(Recovery::DrainAndReset),
        _ => None,
    }
}

/// `Memory cgroup out of memory: Killed process 1234 (python) total-vm:…`
fn oom(text: &str) -> Option<What> {
    let at = text.find("ut of memory: Killed process ")?;
    let rest = &text[at + "ut of memory: Killed process ".len()..];
    let (pid, rest) = rest.split_once(' ')?;
    // A name may hold brackets of its own.
    let rest = rest.strip_prefix('(')?;
    let name = rest.split_once(") total-vm").or_else(|| rest.split_once(')'))?.0;
    Some(What::OomKill { pid: pid.parse().ok()?, name: cut(name), group: text[..at].ends_with("cgroup o") })
}

/// `mlx5_core 0000:1b:00.0 ibp27s0: Link down`
fn link(text: &str) -> Option<What> {
    let rest = text.strip_prefix("mlx5_core ")?;
    let (port, state) = rest.rsplit_once(": Link ")?;
    let up = match state.trim_end() {
        "up" => true,
        "down" => false,
        _ => return None,
    };
    Some(What::Link { port: cut(port), up })
}

/// The beginning of a text, as far as a fact keeps it.
pub(crate) fn cut(text: &str) -> String {
    let mut end = text.len().min(LONGEST_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].trim().to_owned()
}

/// The kernel's log from now on.
#[derive(Debug)]
pub struct Kmsg {
    file: File,
    partial: Vec<u8>,
}

/// The longest line that is kept, in bytes; the kernel's own bound for a record is below.
const LONGEST_LINE: usize = 8 << 10;

impl Kmsg {
    /// Opens it, usually `/dev/kmsg`, at its end.
    ///
    /// # Errors
    /// If it cannot be read, as in most containers, or where `dmesg` is for root alone.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(path)?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self { file, partial: Vec::new() })
    }

    /// Reads what came, at most 1000 records.
    pub fn read(&mut self, mut fact: impl FnMut(Fact)) {
        let mut buffer = vec![0; LONGEST_LINE];
        for _ in 0..1000 {
            match self.file.read(&mut buffer) {
                Ok(0) => return,
                Ok(read) => self.lines(&buffer[..read], &mut fact),
                // Records were overwritten before they were read, or a signal came: the next one is there.
                Err(e) if e.kind() == ErrorKind::Interrupted || e.raw_os_error() == Some(libc::EPIPE) => {}
                Err(_) => return,
            }
        }
    }

    fn lines(&mut self, bytes: &[u8], fact: &mut impl FnMut(Fact)) {
        for piece in bytes.split_inclusive(|b| *b == b'\n') {
            if self.partial.len() + piece.len() <= LONGEST_LINE {
                self.partial.extend_from_slice(piece);
            }
            if piece.ends_with(b"\n") {
                let line = String::from_utf8_lossy(&self.partial);
                // What begins with a blank goes with the record before.
                if let Some(one) = (!line.starts_with(' ')).then(|| read(line.trim_end())).flatten() {
                    fact(one);
                }
                self.partial.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn check(line: &str, expected: &str) {
        let got = read(line).map_or("-".to_owned(), |fact| {
            let at = fact.at_us.map(|us| format!("{us} ")).unwrap_or_default();
            at + &match fact.what {
                What::Xid { pci, code, pid, recovery, text } => format!("xid {code} {pci} {pid:?} {recovery:?} {text}"),
                What::SwitchXid { pci, code, fatal, text } => format!("sxid {code} {pci} {fatal} {text}"),
                What::OomKill { pid, name, group } => format!("oom {pid} {name} {group}"),
                What::Link { port, up } => format!("link {port} {up}"),
            }
        });
        assert_eq!(got, expected, "{line}");
    }

    #[test]
    fn xids() {
        check(
            "4,1234,5678901,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
            "5678901 xid 79 0000:3b:00 Some(1234) None name=python, GPU has fallen off the bus.",
        );
        check(
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "xid 79 0000:3b:00 None None name=<unknown>, GPU has fallen off the bus.",
        );
        check(
            "[ 5678.901234] NVRM: Xid (0000:03:00): 13, Graphics Exception: ESR 0x404600=0x80000002",
            "5678901234 xid 13 0000:03:00 None None Graphics Exception: ESR 0x404600=0x80000002",
        );
        check("NVRM: Xid (PCI:0000:B4:00.0): 48", "xid 48 0000:b4:00 None None ");
        check(
            "NVRM: Xid (PCI:0000:b4:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
            "xid 154 0000:b4:00 None Some(Reboot) GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
        );
        check(
            "NVRM: Xid (PCI:0000:b4:00): 154, pid=7, name=x, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            "xid 154 0000:b4:00 Some(7) Some(Reset) name=x, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        );
        check(
            "NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x0)",
            "xid 149 0009:01:00 None None NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x0)",
        );
        check(
            "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)",
            "sxid 12028 0000:05:00 false Non-fatal, Link 32 egress non-posted PRIV error (First)",
        );
        check(
            "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            "sxid 20034 0000:05:00 true Fatal, Link 30 LTSSM Fault Up",
        );
    }

    #[test]
    fn memory_and_links() {
        check(
            "3,9,77,-;Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB",
            "77 oom 4242 python true",
        );
        check("Out of memory: Killed process 4242 (a (b) c) total-vm:1kB", "oom 4242 a (b) c false");
        check("mlx5_core 0000:1b:00.0 ibp27s0: Link down", "link 0000:1b:00.0 ibp27s0 false");
        check("mlx5_core 0000:1b:00.0: Link up", "link 0000:1b:00.0 true");
    }

    #[test]
    fn other_lines_are_no_facts() {
        for line in [
            "",
            ";",
            "4,5,6,-;",
            "NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
            "NVRM: Xid (PCI:zz): 79",
            "NVRM: Xid (PCI:0000:3b:00): , x",
            "NVRM: Xid (PCI:0000:3b:00: 79",
            "NVRM: Xid (PCI:0000:3b:00): 99999999999999",
            "mlx5_core 0000:1b:00.0: Link flapping",
            "Out of memory: Killed process x (y)",
        ] {
            check(line, "-");
        }
    }

    #[test]
    fn places_have_one_form() {
        for place in ["PCI:0000:3b:00", "0000:3B:00", "00000000:3B:00.0", "PCI:0000:3b:00.0"] {
            assert_eq!(pci(place).as_deref(), Some("0000:3b:00"), "{place}");
        }
        for place in ["", "3b:00", "0000:3b:00:1", "0000:xx:00", "é:3b:00"] {
            assert_eq!(pci(place), None, "{place}");
        }
    }

    #[test]
    fn a_log_is_read_from_its_end_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("kmsg");
        let mut log = File::create(&path).expect("a file");
        let mut add = |text: &str| log.write_all(text.as_bytes()).expect("written");
        add("4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 13, old\n");
        let mut kmsg = Kmsg::open(&path).expect("open");
        let read = |kmsg: &mut Kmsg| {
            let mut codes = Vec::new();
            kmsg.read(|fact| {
                if let What::Xid { code, .. } = fact.what {
                    codes.push(code)
                }
            });
            codes
        };
        add(
            "4,2,2,-;NVRM: Xid (PCI:0000:3b:00): 31, new\n SUBSYSTEM=pci\n DEVICE=+pci:NVRM: Xid (PCI:0000:3b:00): 32,\n4,3,3,-;NVRM: Xid (PCI:0000:3b:00): 4",
        );
        assert_eq!(read(&mut kmsg), [31]);
        add(&format!("3, whole\n{}\n4,4,4,-;NVRM: Xid (PCI:0000:3b:00): 79\n", "x".repeat(1 << 20)));
        assert_eq!(read(&mut kmsg), [43, 79]);
        assert!(kmsg.partial.capacity() <= 2 * LONGEST_LINE);
        assert!(Kmsg::open(&folder.path().join("nowhere")).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_line_is_read_without_a_fault(line in "(NVRM: Xid \\(|SXid \\(|PCI:|\\): |Killed process |ut of memory: |mlx5_core |: Link |pid=| to 0x|[0-9a-f:.,;\\[\\] ()]|\\PC){0,20}") {
            let _ = read(&line);
        }
    }
}
