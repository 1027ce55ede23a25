package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/internal/listen"
	"github.com/nametap/nametap/internal/settings"
)

// A statusClient makes requests to the private socket of the agent on this host. It has the agent's settings (flags,
// environment, Istio's configuration and the --config file), and finds the agent by them.
type statusClient struct{ options *options }

// errNoTable means that the agent has no table yet.
var errNoTable = errors.New(
	"the agent has no table yet; `nametap status` shows whether it is connected to a control plane")

// errNoAgent means that no agent accepts the connection.
var errNoAgent = errors.New("no agent answers")

// declare declares all settings of the agent, because the environment and the file of the agent may have any of them.
// The help shows only the settings that say where the agent is.
func (c *statusClient) declare(flags *pflag.FlagSet) {
	c.options = newOptions(flags)
	flags.VisitAll(func(flag *pflag.Flag) {
		switch flag.Name {
		case settings.ConfigFlag, settings.MeshConfigFlag:
		case statusAddrFlag:
			flag.Usage = "status address of the agent, `host:port`; its private socket has this port in its name"
		case stateDirFlag:
			flag.Usage = "state `directory` of the agent, in which its private socket is if it may not write to /run/nametap"
		default:
			flag.Hidden = true
		}
	})
}

// declareDNS adds the agent's DNS address to the help.
func (c *statusClient) declareDNS() {
	flag := c.options.flags.Lookup(dnsAddrFlag)
	flag.Hidden, flag.Usage = false, "DNS address of the agent, `host:port` ["+settings.Env(flag)+"]"
}

// resolve reads the settings.
func (c *statusClient) resolve() error {
	if err := c.options.resolve(); err != nil {
		return usageError{err}
	}
	return nil
}

// find reads the settings that say where the agent is.
func (c *statusClient) find() error {
	if err := c.resolve(); err != nil {
		return err
	}
	_, err := reachable(statusAddrFlag, c.options.agent.StatusAddr)
	return err
}

// dnsAddr returns the address at which the agent answers queries.
func (c *statusClient) dnsAddr() (string, error) {
	if err := c.resolve(); err != nil {
		return "", err
	}
	return reachable(dnsAddrFlag, c.options.agent.DNS.Addr)
}

// reachable returns the address to connect to if an agent listens on addr, the value of the setting flag.
func reachable(flag, addr string) (string, error) {
	to, err := listen.Reachable(addr)
	if err != nil {
		return "", usageError{fmt.Errorf("--%s=%q: %w", flag, addr, err)}
	}
	return to, nil
}

// get requests path and decodes the JSON reply into v.
func (c *statusClient) get(ctx context.Context, path string, query url.Values, v any) error {
	return c.do(ctx, http.MethodGet, path, query, v)
}

// await waits until the agent is ready, for up to limit. If limit is zero, it does not wait.
func (c *statusClient) await(ctx context.Context, limit time.Duration) error {
	if limit <= 0 {
		return nil
	}
	if err := c.find(); err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := agent.AwaitReady(waiting, c.transport())
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("the agent is not ready after %v (--wait); its log says why: %w", limit, err)
	}
	return ctx.Err()
}

// do makes a request and decodes the JSON reply into v.
//
//nolint:revive // one parameter more than get
func (c *statusClient) do(ctx context.Context, method, path string, query url.Values, v any) error {
	body, err := c.read(ctx, method, path, query)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("the reply to %s is not that of a nametap agent: %w", path, err)
	}
	return nil
}

var readTimeout = 10 * time.Second //nolint:gochecknoglobals // of a request and its reply; tests lengthen it

// read makes a request and returns the body of the reply.
func (c *statusClient) read(ctx context.Context, method, path string, query url.Values) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	resp, err := c.request(ctx, method, path, query)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return body, nil
}

// tail requests queries, and calls the function take with each query until take returns false or an error. It adds the
// number of queries that were lost to lost. At the end of the reply the error is [io.EOF].
func (c *statusClient) tail(
	ctx context.Context, params url.Values, lost *uint64, take func(*seen.Record) (more bool, err error),
) error {
	resp, err := c.request(ctx, http.MethodGet, "/debug/tail", params)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for lines := json.NewDecoder(resp.Body); ; {
		var line agent.TailLine
		if err := lines.Decode(&line); err != nil {
			return err
		}
		*lost += line.Lost
		if line.Record == nil {
			continue
		}
		if more, err := take(line.Record); err != nil || !more {
			return err
		}
	}
}

// request makes a request, and returns the response if it was successful. The caller closes the body of the
// response.
func (c *statusClient) request(ctx context.Context, method, path string, query url.Values) (*http.Response, error) {
	if err := c.find(); err != nil {
		return nil, err
	}
	address := url.URL{Scheme: "http", Host: "localhost", Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, address.String(), http.NoBody)
	if err != nil {
		return nil, err
	}
	client := http.Client{Transport: c.transport()}
	resp, err := client.Do(req)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("%w; run this command with sudo", cause(err))
	case err != nil && ctx.Err() == nil:
		if found := c.findByPorts(ctx, cause(err)); found != nil {
			return nil, *found
		}
		fallthrough
	case err != nil:
		return nil, fmt.Errorf("%w at %s: is it running? --status-addr names another address: %w", errNoAgent,
			c.options.agent.StatusAddr, cause(err))
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading %s: %w", path, err)
	case resp.StatusCode == http.StatusNotFound && strings.TrimSpace(string(body)) == "{}":
		return nil, errNoTable
	}
	return nil, fmt.Errorf("requesting %s: %s: %s", path, resp.Status, strings.TrimSpace(string(body)))
}

// A noSocketError is the error if an agent answers at its ports, and commands cannot ask it at its private socket.
type noSocketError struct {
	at    string // where it answers
	asked string // the status address in the settings of the command
	user  string // its user and group, "" if it does not say
	says  error  // why it is not ready
	err   error  // why commands cannot ask it
}

// findByPorts looks for an agent at its DNS address and its status address. It returns nil if there is none. err is the
// error of its private socket.
func (c *statusClient) findByPorts(ctx context.Context, err error) *noSocketError {
	found := &noSocketError{asked: c.options.agent.StatusAddr, err: err}
	if status, err := reachable(statusAddrFlag, c.options.agent.StatusAddr); err == nil {
		found.user, found.says, err = agent.AskHealth(ctx, &http.Transport{DisableKeepAlives: true}, status)
		if err == nil && found.user != "" {
			found.at = c.options.agent.StatusAddr
			return found
		}
	}
	if addr, err := reachable(dnsAddrFlag, c.options.agent.DNS.Addr); err == nil && (probe.Query{Network: "udp", To: addr}).Ask(ctx).State == probe.Agent {
		found.at = c.options.agent.DNS.Addr
		return found
	}
	return nil
}

// Error says which directory to make.
func (e noSocketError) Error() string {
	p := e.problem()
	return p.What + ": " + p.Evidence + "; " + p.Mend
}

// problem returns what is wrong.
func (e noSocketError) problem() condition.Problem {
	p := condition.Problem{
		Severity: condition.Minor, What: "an agent answers at " + e.at + ", but commands cannot ask it",
		Evidence: e.err.Error(),
		Effect:   "names resolve; nametap status, tail, table and doctor show nothing of the agent",
		Mend:     "give this command the agent's --status-addr and --state-dir", Rows: []string{"R15"},
	}
	switch {
	case e.user == "":
		p.Evidence += ", and no agent answers at " + e.asked
	case errors.Is(e.err, fs.ErrNotExist):
		p.Mend = "make the directory for its socket: install -d -o " + strings.Replace(e.user, ":", " -g ", 1) +
			" /run/nametap; the agent opens the socket within a second. Or, if it has another one, " + p.Mend
	}
	if e.says != nil {
		p.Evidence += "; the agent says: " + e.says.Error()
	}
	return p
}

// transport returns a transport to the agent, over the agent's private socket.
func (c *statusClient) transport() http.RoundTripper {
	paths := agent.SocketPaths(agent.SocketDirs(c.options.agent.XDS.StateDir), c.options.agent.StatusAddr)
	return &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return agent.DialPrivate(ctx, paths)
	}}
}

// cause returns the error of a request without the URL, whose host is localhost for every agent.
func cause(err error) error {
	if failed, ok := errors.AsType[*url.Error](err); ok {
		return failed.Err
	}
	return err
}
