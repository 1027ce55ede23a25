package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/nametap/nametap/internal/settings"
)

// A statusClient asks the status endpoints of the agent on this host. It finds the
// agent by the agent's own settings: flags, environment, Istio's configuration and
// the --config file.
type statusClient struct{ options *options }

// errNoTable means that the agent has no table yet.
var errNoTable = errors.New("the agent has no table yet: is its control plane there? `nametap status` tells")

// declare declares all settings of the agent, so that its environment and its file
// are understood. The help shows those that say where the agent is.
func (c *statusClient) declare(flags *pflag.FlagSet) {
	c.options = newOptions(flags)
	flags.VisitAll(func(flag *pflag.Flag) {
		switch flag.Name {
		case settings.ConfigFlag, settings.MeshConfigFlag:
		case statusAddrFlag:
			flag.Usage = "the agent's status address"
		default:
			flag.Hidden = true
		}
	})
}

// declareDNS shows the agent's DNS address in the help, too.
func (c *statusClient) declareDNS() {
	flag := c.options.flags.Lookup(dnsAddrFlag)
	flag.Hidden, flag.Usage = false, "the agent's DNS address ["+settings.Env(flag)+"]"
}

// resolve reads the settings. It may be called again.
func (c *statusClient) resolve() error {
	if err := c.options.resolve(); err != nil {
		return usageError{err}
	}
	return nil
}

// dnsAddr returns where the agent answers queries.
func (c *statusClient) dnsAddr() (string, error) {
	if err := c.resolve(); err != nil {
		return "", err
	}
	return reachable(dnsAddrFlag, c.options.agent.DNS.Addr)
}

// reachable turns an address to listen on into one to connect to: where that is
// every address of the host, it is localhost.
func reachable(flag, addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", usageError{fmt.Errorf("--%s=%q: want host:port", flag, addr)}
	}
	if ip, err := netip.ParseAddr(host); host == "" || err == nil && ip.IsUnspecified() {
		host = "localhost"
	}
	return net.JoinHostPort(host, port), nil
}

// get asks for path and decodes the JSON reply into v.
func (c *statusClient) get(ctx context.Context, path string, query url.Values, v any) error {
	return c.do(ctx, http.MethodGet, path, query, v)
}

// do makes a request and decodes the JSON reply into v.
//
//nolint:revive // one parameter more than get
func (c *statusClient) do(ctx context.Context, method, path string, query url.Values, v any) error {
	if err := c.resolve(); err != nil {
		return err
	}
	addr, err := reachable(statusAddrFlag, c.options.agent.StatusAddr)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	address := url.URL{Scheme: "http", Host: addr, Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, address.String(), http.NoBody)
	if err != nil {
		return err
	}
	// No proxy: the agent is on this host.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("no agent answers at %s (is it running? --status-addr): %w", addr, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("reading %s: %w", address.String(), err)
	}
	switch {
	case resp.StatusCode == http.StatusNotFound && strings.TrimSpace(string(body)) == "{}":
		return errNoTable
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("asking %s: %s: %s", address.String(), resp.Status, strings.TrimSpace(string(body)))
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("%s is no nametap: %w", addr, err)
	}
	return nil
}
