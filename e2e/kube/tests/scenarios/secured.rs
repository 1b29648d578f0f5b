//! Agents and the control plane speak TLS, and agents with nobody else.

use super::LONGEST;
use crate::World;
use anyhow::{Result, ensure};
use aviflow_e2e_kube::{Phase as _, tls};
use aviflow_testcluster::until;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;

pub fn agents_say_nothing_without_tls(world: &mut World) -> Result<()> {
    let script = "until [ -e /tmp/end ]; do sleep 0.2; done; echo the end";
    world.cluster.apply(&world.job("secured", 1, 1, script).to_string())?;
    world.cluster.phase("secured", "Running")?;
    let address = format!("{}:7081", world.cluster.host_ip());
    // By its authority, openssl takes it for who it is; who then says nothing that is a hello hears nothing.
    let authority = tls::authority(&world.cluster)?;
    ensure!(tls::agents(&address, authority.path(), "{}\n")?.is_empty(), "it has spoken with nobody");

    world.plane.kill()?;
    // Somebody else in its place, who speaks as it would without TLS.
    let listener = TcpListener::bind(&address)?;
    let (mut agent, _) = listener.accept()?;
    agent.set_read_timeout(Some(LONGEST))?;
    agent.write_all(b"{\"type\":\"welcome\",\"term\":1000,\"logHave\":0}\n")?;
    agent.write_all(b"{\"type\":\"stop\",\"term\":1000,\"graceMs\":0,\"reason\":\"test\"}\n")?;
    let mut heard = Vec::new();
    // It ends as soon as it sees that this is no TLS; bytes that it has not read make that a reset.
    let _ = agent.read_to_end(&mut heard);
    ensure!(heard.first() == Some(&0x16), "this is no handshake: {heard:?}");
    let text = String::from_utf8_lossy(&heard);
    ensure!(!text.contains("hello") && !text.contains("token"), "it told who it is: {text}");
    drop((agent, listener));

    world.plane.run()?;
    // Its agent finds it again within a moment.
    until("the agent is back", LONGEST, || {
        Ok(world.plane.aviflow(&["exec", "secured", "--", "touch", "/tmp/end"])?.status.success().then_some(()))
    })?;
    let object = world.cluster.phase("secured", "Succeeded")?;
    ensure!(object["status"]["attempt"] == 1, "{}", object["status"]);
    let log = world.plane.ok(&["logs", "secured"])?;
    ensure!(log.contains("the end"), "{log}");
    super::sweep_jobs(world)
}
