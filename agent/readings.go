package agent

import "context"

// A reading is the part of the status that comes from outside the process: from iptables and
// test queries.
type reading struct {
	silent           []string
	capture          *CaptureStatus
	onlyNameserverOf string
	redirected       []Probe
}

// read takes a reading for c. Only root and the user of the agent can ask for one.
func read(ctx context.Context, c *core) reading {
	found := reading{silent: silentTexts(probeAll(ctx, listenerQuestions(askID, c.proxy.Addrs()...), nil))}
	if c.capture != nil {
		found.capture = c.capture.status(ctx)
		return found
	}
	found.onlyNameserverOf = OnlyNameserverOf(c.config.DNS.Forward.ResolvConf, addrPorts(c.proxy))
	if found.onlyNameserverOf == "" {
		found.redirected = Redirections(ctx, listeningFamilies(c.proxy))
	}
	return found
}
