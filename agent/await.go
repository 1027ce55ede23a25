package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/iptables"
)

const (
	// awaitInterval is the pause between two probes of an agent in another container.
	awaitInterval = 20 * time.Millisecond
	// awaitFamily is how long Await waits for the second family after the first family has answered.
	awaitFamily = time.Second
	// awaitStatus is how long the status address may be unreachable after the listeners, which open later, answer.
	awaitStatus = time.Second
	// awaitQuiet is how long the wait lasts before it is logged.
	awaitQuiet = time.Second
)

// An Awaited is an agent that runs in another container of the pod.
type Awaited struct {
	// Rules are the rules that will redirect queries to the agent.
	Rules iptables.Config
	// StatusAddr is the host:port of the agent's status endpoints.
	StatusAddr string
	// Logger is the log.
	Logger    *slog.Logger
	transport http.RoundTripper // connects to StatusAddr; nil for TCP
	starts    bool              // whether the agent may have to start first
}

// Await waits until listeners answer, over UDP and TCP, at the addresses to which the rules redirect. Then it waits
// until the agent is ready, so that even the first captured queries are answered from a table. If only the listeners
// of one family answer, Await returns the rules without the other family.
//
// Await returns an error if ctx ends while it waits for listeners, and [ErrCapturesItself] if the rules would
// redirect the agent's own queries. If the agent is not ready when ctx ends, or its status address does not answer,
// Await logs that and returns the rules: the agent forwards without a table.
func (w Awaited) Await(ctx context.Context) (iptables.Config, error) {
	began := time.Now()
	rules, err := w.awaitListeners(ctx)
	if err != nil {
		return rules, err
	}
	answered := time.Since(began)
	user, err := w.awaitReady(ctx)
	if captured := w.capturesItself(user); captured != nil {
		return rules, captured
	}
	if err != nil {
		w.Logger.Warn("capturing without a table of mesh hosts: the agent forwards until it has one", "error", err)
		return rules, nil
	}
	w.Logger.Info("the agent is ready", "listeners", answered.Round(time.Millisecond), "after", time.Since(began).Round(time.Millisecond))
	return rules, nil
}

// ErrCapturesItself is the error if the rules would redirect the agent's own queries to the agent.
var ErrCapturesItself = errors.New("the rules would redirect the agent's own queries to itself")

// capturesItself returns an error if the rules would redirect the queries of user, the agent's "uid:gid". If user is
// "", the agent has not said its user, and capturesItself returns nil.
func (w Awaited) capturesItself(user string) error {
	var uid, gid uint32
	if _, err := fmt.Sscanf(user, "%d:%d", &uid, &gid); err != nil {
		return nil //nolint:nilerr // the status address is wrong, or the agent's version does not send its user
	}
	if slices.Contains(w.Rules.AgentUIDs, uid) || slices.Contains(w.Rules.AgentGIDs, gid) {
		return nil
	}
	return fmt.Errorf("%w: it has uid %d and gid %d: run it as a user or group of --capture-agent-uid %v or --capture-agent-gid %v",
		ErrCapturesItself, uid, gid, w.Rules.AgentUIDs, w.Rules.AgentGIDs)
}

// awaitListeners waits until the listeners of all wanted families answer. If a family has not answered within the time
// awaitFamily after the other one, awaitListeners returns the rules without that family.
func (w Awaited) awaitListeners(ctx context.Context) (iptables.Config, error) {
	began := time.Now()
	var firstAnswer time.Time // when a family first answered
	var silent error          // why listeners did not answer when they were last probed
	for logged := false; ; {
		found := w.probeListeners(ctx)
		if ctx.Err() != nil && silent != nil {
			return w.Rules, silent // the errors in found only say that ctx has ended
		}
		rules, served, missing := w.fit(found)
		silent = nil
		for _, p := range found {
			silent = errors.Join(silent, p.Err)
		}
		if served && firstAnswer.IsZero() {
			firstAnswer = time.Now()
		}
		switch {
		case served && missing == nil:
			return rules, nil
		case served && time.Since(firstAnswer) >= awaitFamily:
			w.Logger.Warn("DNS over one family is not captured: the agent does not answer over it", "error", missing)
			return rules, nil
		case time.Since(began) >= awaitQuiet && !logged:
			logged = true
			w.Logger.Info("waiting for the agent", "error", silent)
		}
		if !clock.Sleep(ctx, awaitInterval) {
			return w.Rules, silent
		}
	}
}

// fit returns the rules without the families that do not answer. The result missing says why they do not answer, and
// served is true if any family answers. The parameter found is a result of probeListeners. If the host has no address
// of a family, fit keeps the rules of the family: no query uses them.
func (w Awaited) fit(found []Probe) (rules iptables.Config, served bool, missing error) {
	rules = w.Rules
	for i, f := range w.Rules.Families() {
		udp, tcp := found[2*i], found[2*i+1]
		switch err := errors.Join(udp.Err, tcp.Err); {
		case err == nil:
			served = true
		// If one of the two listeners answers, the host has the family. The error of the other probe can still be
		// EADDRNOTAVAIL, because the kernel also returns this error if no local port is free.
		case udp.State != ProbeAbsent && tcp.State != ProbeAbsent || udp.Err == nil || tcp.Err == nil:
			rules, missing = rules.Without(f), errors.Join(missing, err)
		}
	}
	return rules, served, missing
}

// probeListeners probes the listeners to which queries of this host are redirected: for each family the UDP listener,
// and then the TCP listener.
func (w Awaited) probeListeners(ctx context.Context) []Probe {
	var all []dnsproxy.Addr
	for _, f := range w.Rules.Families() {
		all = append(all, listenersAt(f, w.Rules.Port)...)
	}
	return probeAll(ctx, listenerQuestions(askVersion, all...), isNametap)
}

// awaitReady waits until the response of /healthz/ready has the status 200: the agent has a table, or has waited for a
// table for [Config.ReadyTimeout]. It returns an error if ctx ends first, or if the status address does not answer.
// user is the agent's "uid:gid" from [userHeader], or "" if there was no such header.
func (w Awaited) awaitReady(ctx context.Context) (user string, err error) {
	client := http.Client{Transport: cmp.Or[http.RoundTripper](w.transport, &http.Transport{}), Timeout: probeTimeout} // without a proxy
	defer client.CloseIdleConnections()
	began := time.Now()
	var reason error // why the agent was not ready, according to its last response
	for logged := false; ; {
		agentUser, reached, err := w.notReady(ctx, &client)
		switch {
		case err == nil:
			return agentUser, nil
		case reached:
			user, reason = agentUser, err
		case ctx.Err() != nil:
			return user, cmp.Or(reason, err)
		case time.Since(began) >= awaitStatus && !w.starts:
			return user, fmt.Errorf("the status address does not answer; both containers need the same --status-addr: %w", err)
		}
		if time.Since(began) >= awaitQuiet && !logged {
			logged = true
			w.Logger.Info("waiting for the table of mesh hosts", "reason", err)
		}
		if !clock.Sleep(ctx, awaitInterval) {
			return user, err
		}
	}
}

// notReady returns an error that says why the agent is not ready, or nil if it is ready. reached is true if there
// was a response; then user is the agent's user.
func (w Awaited) notReady(ctx context.Context, client *http.Client) (user string, reached bool, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+w.statusAddr()+"/healthz/ready", http.NoBody)
	if err != nil {
		return "", false, err
	}
	response, err := client.Do(request)
	if err != nil {
		return "", false, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<10))
	switch {
	case err != nil:
		return "", false, err
	case response.StatusCode != http.StatusOK:
		err = errors.New(strings.TrimSpace(string(body)))
	}
	return response.Header.Get(userHeader), true, err
}

// statusAddr returns the address at which the status endpoints are reached on this host.
func (w Awaited) statusAddr() string {
	if host, port, err := net.SplitHostPort(w.StatusAddr); err == nil && (host == "" || host == "localhost") {
		return net.JoinHostPort("127.0.0.1", port)
	}
	return reachable(w.StatusAddr)
}

// AskHealth asks an agent at its status address about its health. It returns the agent's "uid:gid", and what it says.
func AskHealth(ctx context.Context, addr string) (user, says string, err error) {
	client := http.Client{Transport: &http.Transport{}, Timeout: probeTimeout} // without a proxy
	defer client.CloseIdleConnections()
	user, reached, err := Awaited{StatusAddr: addr}.notReady(ctx, &client)
	switch {
	case !reached:
		return "", "", err
	case err != nil:
		says = err.Error()
	}
	return user, says, nil
}

// AwaitReady waits until an agent is ready: it has a table, or has waited for a table for [Config.ReadyTimeout].
// transport connects to the agent. If ctx ends first, the error says why the agent is not ready.
func AwaitReady(ctx context.Context, transport http.RoundTripper) error {
	w := Awaited{StatusAddr: "localhost:80", Logger: slog.New(slog.DiscardHandler), transport: transport, starts: true}
	_, err := w.awaitReady(ctx)
	return err
}
