//! `forward`.

use super::App;
use crate::channel::{Channel, Out, Put};
use crate::cli::ForwardArgs;
use crate::client::Client;
use crate::error::{Failure, Result, While};
use crate::output::{note, print};
use aviflow_api::rest::{ChannelTo, OpenChannel};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::str::FromStr;
use std::thread::JoinHandle;

/// Bytes of a connection that are read at once.
const BYTES: usize = 32 << 10;

/// A port here and one beside the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// Here; any that is free if 0.
    pub local: u16,
    /// There.
    pub remote: u16,
}

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Ports, String> {
        let (local, remote) = text.split_once(':').unwrap_or((text, text));
        let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is no port: write 6006, or LOCAL:PORT"));
        let remote: u16 = number(remote)?;
        if remote == 0 {
            return Err("there is no port 0 beside a rank".to_owned());
        }
        // A colon alone asks for any port, as elsewhere.
        let local = if local.is_empty() { 0 } else { number(local)? };
        Ok(Ports { local, remote })
    }
}

/// `aviflow forward`
pub fn forward(app: &App, args: &ForwardArgs) -> Result<()> {
    let client = app.client()?;
    let job = client.job(&args.job)?.summary;
    if job.phase != "Running" && job.phase != "Starting" {
        return Err(Failure::new(format!("{} is {}, so nothing listens there", args.job, job.phase))
            .help(format!("`aviflow show {}` says how it stands", args.job)));
    }
    // The full key: a bare name would mean a later job of the same name.
    let key = format!("{}/{}", job.namespace, job.name);
    let mut listening: Vec<JoinHandle<()>> = Vec::new();
    for ports in &args.ports {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, ports.local)).map_err(|e| {
            Failure::new(format!("port {} of this machine cannot be used: {e}", ports.local)).help(format!(
                "`{}:{}` takes another, `:{}` any that is free",
                ports.local.max(1024).wrapping_add(1),
                ports.remote,
                ports.remote
            ))
        })?;
        let at = listener.local_addr().or_fail(|| "this machine gives no address".to_owned())?;
        print(&format!("forwarding {at} to port {} beside rank {} of {key}\n", ports.remote, args.rank));
        let (client, key, rank, remote) = (client.clone(), key.clone(), args.rank, ports.remote);
        listening.push(std::thread::spawn(move || listen(&listener, &client, &key, rank, remote)));
    }
    for one in listening {
        let _ = one.join();
    }
    Ok(())
}

fn listen(listener: &TcpListener, client: &Client, job: &str, rank: u32, port: u16) {
    for stream in listener.incoming().flatten() {
        let (client, job) = (client.clone(), job.to_owned());
        std::thread::spawn(move || {
            if let Err(failure) = carry(stream, &client, &job, rank, port) {
                let help = failure.help.map_or_else(String::new, |help| format!("; {help}"));
                note(&format!("port {port} beside rank {rank} of {job}: {}{help}", failure.message));
            }
        });
    }
}

/// Carries one connection until both ends have closed it.
fn carry(stream: TcpStream, client: &Client, job: &str, rank: u32, port: u16) -> Result<()> {
    let mut channel = Channel::open(client, job, &OpenChannel { rank: Some(rank), to: ChannelTo::Port { port } })?;
    let mut from = stream.try_clone().or_fail(|| "the connection cannot be used".to_owned())?;
    let input = channel.input.clone();
    let reading = std::thread::spawn(move || {
        let mut buffer = vec![0; BYTES];
        loop {
            let put = match from.read(&mut buffer) {
                Ok(0) | Err(_) => Put::End,
                Ok(n) => Put::Data(buffer[..n].to_vec()),
            };
            let last = matches!(put, Put::End);
            if input.send(put).is_err() || last {
                return;
            }
        }
    });
    let mut to = &stream;
    let carried = loop {
        match channel.next() {
            Ok(Out::Data(bytes)) => {
                if to.write_all(&bytes).is_err() {
                    // Who does not read any more has gone.
                    break Ok(());
                }
            }
            Ok(Out::End) => drop(stream.shutdown(Shutdown::Write)),
            Ok(Out::Exit(_)) => break Ok(()),
            Err(failure) => break Err(failure),
        }
    };
    // Also ends the reading.
    let _ = stream.shutdown(Shutdown::Both);
    drop(channel);
    let _ = reading.join();
    carried
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read() {
        let ports = |local, remote| Ok(Ports { local, remote });
        assert_eq!("6006".parse(), ports(6006, 6006));
        assert_eq!("8080:6006".parse(), ports(8080, 6006));
        assert_eq!(":6006".parse(), ports(0, 6006));
        for wrong in ["", "x", "6006:", "1:2:3", "70000", "80:0", "0"] {
            assert!(wrong.parse::<Ports>().is_err(), "{wrong}");
        }
    }
}
