//! What people do, and what comes of it.
