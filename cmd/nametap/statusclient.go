package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// A statusClient asks the status endpoints of the agent on this host.
type statusClient struct{ addr string }

// errNoTable means that the agent has no table yet.
var errNoTable = errors.New("the agent has no table yet: is its control plane there? `nametap status` tells")

func (c *statusClient) declare(flags *pflag.FlagSet) {
	flags.StringVar(&c.addr, "status-addr", "localhost:15020", "the agent's status address")
}

// get asks for path and decodes the JSON reply into v.
func (c *statusClient) get(ctx context.Context, path string, query url.Values, v any) error {
	host, port, err := net.SplitHostPort(c.addr)
	if err != nil {
		return usageError{fmt.Errorf("--status-addr=%q: want host:port", c.addr)}
	}
	if host == "" {
		host = "localhost"
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	address := url.URL{Scheme: "http", Host: net.JoinHostPort(host, port), Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address.String(), http.NoBody)
	if err != nil {
		return err
	}
	// No proxy: the agent is on this host.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("no agent answers at %s (is it running? --status-addr): %w", c.addr, err)
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
		return fmt.Errorf("%s is no nametap: %w", c.addr, err)
	}
	return nil
}
