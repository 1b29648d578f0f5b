//! A PostgreSQL server for tests: a real one, in a temporary folder, on a Unix socket.
//!
//! It needs PostgreSQL's programs on this machine, as Debian's package `postgresql`
//! brings them. It ends with the process that started it, however that ends: a shell
//! between the two waits for the end of its standard input.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "for tests")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Starts the server as `$2` (nobody else than root may be asked to change users), ends it when
/// standard input does, and removes the folder. It says `ready` once it answers.
const KEEPER: &str = r#"
bin=$1 user=$2 group=$3 folder=$4 keep=$5
cd / || exit 1
trap '' INT TERM HUP
as=
if [ "$user" != - ]; then as="setpriv --reuid=$user --regid=$group --clear-groups"; fi
if [ ! -e "$folder/data" ]; then
    $as "$bin/initdb" --no-sync --no-locale --encoding=UTF8 --auth=trust --username=aviflow -D "$folder/data" \
        >"$folder/initdb.log" 2>&1 </dev/null || { cat "$folder/initdb.log"; exit 1; }
    echo "listen_addresses = ''" >>"$folder/data/postgresql.conf"
fi
$as "$bin/postgres" -D "$folder/data" -k "$folder" -c fsync=off -c full_page_writes=off \
    -c shared_buffers=32MB -c max_connections=200 -c autovacuum=off </dev/null >>"$folder/server.log" 2>&1 &
server=$!
until $as "$bin/pg_isready" -q -h "$folder" -U aviflow -d postgres; do
    kill -0 $server 2>/dev/null || { cat "$folder/server.log"; exit 1; }
done
echo ready
cat >/dev/null
kill -QUIT $server
wait $server
if [ "$keep" = remove ]; then rm -rf "$folder"; fi
"#;

/// A server.
#[derive(Debug)]
pub struct Server {
    folder: PathBuf,
    keeper: Child,
    next: AtomicU32,
}

impl Server {
    /// The one that the tests of a program share.
    pub fn shared() -> &'static Server {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(|| {
            let folder = std::env::temp_dir().join(format!("aviflow-postgres-{}", std::process::id()));
            // Of a process of the same number, before the machine went down.
            let _ = std::fs::remove_dir_all(&folder);
            Server::start(&folder, true)
        })
    }

    /// One on a folder, with the databases that are there; with `remove` the folder goes with it.
    ///
    /// # Panics
    /// If PostgreSQL is not installed, or does not start.
    #[must_use]
    pub fn start(folder: &Path, remove: bool) -> Server {
        let bin = programs();
        std::fs::create_dir_all(folder).unwrap();
        let (user, group) = owner(folder);
        let mut command = Command::new("sh");
        command.args(["-c", KEEPER, "server"]).arg(bin).args([&user, &group]).arg(folder);
        command.arg(if remove { "remove" } else { "keep" });
        let mut keeper = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh");
        let mut said = String::new();
        for line in BufReader::new(keeper.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            if line == "ready" {
                return Server { folder: folder.to_owned(), keeper, next: AtomicU32::new(0) };
            }
            said.push_str(&line);
            said.push('\n');
        }
        let _ = keeper.wait();
        panic!("PostgreSQL does not start:\n{said}");
    }

    /// The address of a database of its own, which is empty.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn database(&self) -> String {
        let name = format!("test{}", self.next.fetch_add(1, Ordering::Relaxed));
        self.psql("postgres", &format!("CREATE DATABASE {name}"));
        self.url(&name)
    }

    /// The address of a database by its name.
    #[must_use]
    pub fn url(&self, name: &str) -> String {
        format!("postgres:///{name}?host={}&user=aviflow", self.folder.display())
    }

    /// The folder of its socket.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What `psql` answers to statements.
    ///
    /// # Panics
    /// If one of them fails.
    pub fn psql(&self, database: &str, text: &str) -> String {
        let out = self.program("psql").args(["-XqAt", "-v", "ON_ERROR_STOP=1", "-d", database, "-c", text]).output();
        let out = out.expect("psql");
        assert!(out.status.success(), "{text}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap().trim_end().to_owned()
    }

    /// One of PostgreSQL's programs, told where the server is.
    #[must_use]
    pub fn program(&self, name: &str) -> Command {
        let mut command = Command::new(programs().join(name));
        command.env("PGHOST", &self.folder).env("PGUSER", "aviflow");
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Its standard input ends, and with it the server.
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

/// The folder of PostgreSQL's programs, of the newest version that there is.
fn programs() -> PathBuf {
    let there = |folder: &PathBuf| ["initdb", "postgres", "psql"].iter().all(|name| folder.join(name).exists());
    let version = |folder: &PathBuf| -> u32 {
        let name = folder.parent().and_then(Path::file_name).and_then(|name| name.to_str());
        name.and_then(|name| name.parse().ok()).unwrap_or(0)
    };
    let installed = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let newest = installed.map(|entry| entry.path().join("bin")).filter(there).max_by_key(version);
    let path = std::env::var_os("PATH").unwrap_or_default();
    newest.or_else(|| std::env::split_paths(&path).find(there)).expect(
        "the tests of the store on PostgreSQL need its server: `apt-get install postgresql`, or `cargo xtask test`, \
         which installs it",
    )
}

/// Whom the server runs as, since it refuses to run as root; the folder becomes his.
fn owner(folder: &Path) -> (String, String) {
    let id = |args: &[&str]| {
        let out = Command::new("id").args(args).output().expect("id");
        out.status.success().then(|| String::from_utf8(out.stdout).unwrap().trim().to_owned())
    };
    if id(&["-u"]).as_deref() != Some("0") {
        return ("-".to_owned(), "-".to_owned());
    }
    let user = ["postgres", "nobody"].into_iter().find_map(|name| Some((id(&["-u", name])?, id(&["-g", name])?)));
    let (user, group) = user.expect("a user `postgres` or `nobody`");
    std::os::unix::fs::chown(folder, user.parse().ok(), group.parse().ok()).unwrap();
    (user, group)
}
