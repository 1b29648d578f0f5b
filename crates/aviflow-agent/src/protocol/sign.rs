//! What an agent notices and does not judge: the control plane puts it together with what others say.

use serde::{Deserialize, Serialize};

/// Something that was noticed. It is for the present: a control plane that was away is not told it later.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "sign")]
pub enum Sign {
    /// The training said or did something that is no step: it loads data or weights, or evaluates. At most once a
    /// second for a worker.
    Active,
    /// What a rank does in the training, as a number that is equal for equal work, such as the stage of a pipeline.
    #[serde(rename_all = "camelCase")]
    Role {
        /// The rank.
        rank: u32,
        /// The number.
        role: u16,
    },
    /// A rank entered a collective.
    #[serde(rename_all = "camelCase")]
    Collective {
        /// The rank.
        rank: u32,
        /// Its number, as the process group counts.
        number: u64,
    },
    /// The kernel log of the node has an XID of NVIDIA's driver.
    #[serde(rename_all = "camelCase")]
    Xid {
        /// The number.
        number: u32,
        /// The GPU's slot on the node, where it is one that is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        gpu: Option<u32>,
        /// The line of the log, at most [`crate::kernel::LONGEST_TEXT`] bytes.
        text: String,
    },
    /// A port of the node's InfiniBand adapters changed, or its counters did.
    #[serde(rename_all = "camelCase")]
    Port {
        /// The adapter, such as `mlx5_0`.
        device: String,
        /// The number of the port.
        port: u32,
        /// Whether it is active, where that is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        active: Option<bool>,
        /// How often the link went down since the driver was loaded (`link_downed`).
        downed: u64,
        /// Its symbol errors since then (`symbol_error`).
        symbol_errors: u64,
    },
    /// A folder that the job writes to has no space left.
    #[serde(rename_all = "camelCase")]
    DiskFull {
        /// The folder, as ranks see it.
        path: String,
    },
}
