//! An API server and its etcd on this machine, for as long as the value lives.
//!
//! No kubelet and no scheduler: what is tested is what the API server takes, refuses and shows.

use serde_json::Value as Json;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A running API server.
pub struct Cluster {
    bin: PathBuf,
    state: tempfile::TempDir,
    address: String,
    children: Vec<Child>,
}

/// What a command said.
pub struct Said {
    pub ok: bool,
    pub out: String,
    pub err: String,
}

impl Cluster {
    /// Starts one with the binaries of a folder: etcd, kube-apiserver, kubectl.
    pub fn start(bin: &Path) -> Cluster {
        let state = tempfile::tempdir().unwrap();
        let [etcd, peer, api] = ports();
        let address = format!("https://127.0.0.1:{api}");
        let mut cluster = Cluster { bin: bin.to_owned(), state, address, children: Vec::new() };
        cluster.openssl("req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 2 -subj /CN=ca");
        cluster.certificate("apiserver", "/CN=kube-apiserver");
        cluster.openssl("genrsa -out sa.key 2048");
        cluster.openssl("rsa -in sa.key -pubout -out sa.pub");
        cluster.user("admin", "/O=system:masters/CN=admin");
        let etcd = format!("http://127.0.0.1:{etcd}");
        let data = cluster.path("etcd");
        let arguments = format!(
            "--data-dir {} --listen-client-urls {etcd} --advertise-client-urls {etcd} \
             --listen-peer-urls http://127.0.0.1:{peer} --unsafe-no-fsync --log-level error",
            data.display()
        );
        cluster.spawn("etcd", &arguments);
        let arguments = format!(
            "--etcd-servers={etcd} --service-cluster-ip-range=10.96.0.0/16 --client-ca-file=ca.crt \
             --tls-cert-file=apiserver.crt --tls-private-key-file=apiserver.key \
             --service-account-key-file=sa.pub --service-account-signing-key-file=sa.key \
             --service-account-issuer=https://kubernetes.default.svc --authorization-mode=Node,RBAC \
             --bind-address=127.0.0.1 --secure-port={api} --advertise-address=127.0.0.1 \
             --endpoint-reconciler-type=none \
             --disable-admission-plugins=ServiceAccount --cert-dir=."
        );
        cluster.spawn("kube-apiserver", &arguments);
        cluster.until("the API server is ready", |c| c.kubectl("admin", "get --raw /readyz", "").ok);
        cluster
    }

    fn path(&self, name: &str) -> PathBuf {
        self.state.path().join(name)
    }

    fn openssl(&self, arguments: &str) {
        let mut command = Command::new("openssl");
        let out = command.args(arguments.split_whitespace()).current_dir(self.state.path()).output().unwrap();
        assert!(out.status.success(), "openssl {arguments}: {}", String::from_utf8_lossy(&out.stderr));
    }

    fn certificate(&self, name: &str, subject: &str) {
        std::fs::write(self.path("san"), "subjectAltName=IP:127.0.0.1,DNS:localhost").unwrap();
        self.openssl(&format!("req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj {subject}"));
        self.openssl(&format!(
            "x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out {name}.crt -days 2 -extfile san"
        ));
    }

    /// Gives somebody a client certificate and a kubeconfig.
    pub fn user(&self, name: &str, subject: &str) {
        self.certificate(name, subject);
        let file = |name: String| self.path(&name).display().to_string();
        let config = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.address, "certificate-authority": file("ca.crt".into())}}],
            "users": [{"name": "u", "user": {
                "client-certificate": file(format!("{name}.crt")),
                "client-key": file(format!("{name}.key")),
            }}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        });
        std::fs::write(self.config(name), config.to_string()).unwrap();
    }

    /// The kubeconfig of a user.
    pub fn config(&self, user: &str) -> PathBuf {
        self.path(&format!("{user}.conf"))
    }

    fn spawn(&mut self, program: &str, arguments: &str) {
        let log = std::fs::File::create(self.path(&format!("{program}.log"))).unwrap();
        let mut command = Command::new(self.bin.join(program));
        command.args(arguments.split_whitespace()).current_dir(self.state.path()).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.children.push(command.spawn().unwrap_or_else(|e| panic!("{program}: {e}")));
    }

    /// Runs one of the binaries as a user, with a text on its standard input.
    pub fn run(&self, program: &str, user: &str, arguments: &[&str], input: &str) -> Said {
        let mut command = Command::new(self.bin.join(program));
        command.args(arguments).env("KUBECONFIG", self.config(user)).env("HOME", self.state.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{program}: {e}"));
        // Who reads nothing may be gone already.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Said { ok: status.success(), out: text(stdout), err: text(stderr) }
    }

    /// kubectl with words that have no blanks in them.
    pub fn kubectl(&self, user: &str, arguments: &str, input: &str) -> Said {
        self.run("kubectl", user, &arguments.split_whitespace().collect::<Vec<_>>(), input)
    }

    /// The same, that has to go well.
    pub fn must(&self, user: &str, arguments: &str, input: &str) -> String {
        let said = self.kubectl(user, arguments, input);
        assert!(said.ok, "kubectl {arguments} as {user}: {}\n{input}", said.err);
        said.out
    }

    /// An object as it is.
    pub fn get(&self, what: &str) -> Json {
        serde_json::from_str(&self.must("admin", &format!("get {what} -o json"), "")).unwrap()
    }

    /// Waits for what comes by itself, such as policies that the API server reads in the background.
    pub fn until(&mut self, what: &str, mut condition: impl FnMut(&Cluster) -> bool) {
        let begun = Instant::now();
        while !condition(self) {
            for child in &mut self.children {
                if let Some(status) = child.try_wait().unwrap() {
                    panic!("waited until {what}, and a process ended: {status}\n{}", self.logs());
                }
            }
            assert!(begun.elapsed() < Duration::from_secs(180), "waited until {what}\n{}", self.logs());
            // sleep: nothing tells when another process has got so far; it is asked again.
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn logs(&self) -> String {
        let log = |name: &str| std::fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
        let tail = |text: String| text.lines().rev().take(20).map(|l| format!("{l}\n")).collect::<String>();
        format!("{}{}", tail(log("etcd")), tail(log("kube-apiserver")))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for child in self.children.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Ports that were free a moment ago.
fn ports() -> [u16; 3] {
    let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|l| l.local_addr().unwrap().port())
}
