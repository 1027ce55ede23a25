package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/agent/problems"
	"github.com/nametap/nametap/internal/version"
)

// A bundle is a tar file for a ticket. It has no names of the mesh; the queries that failed, and their clients, are in
// it.
type bundle struct {
	client *statusClient
	tar    *tar.Writer
	errs   []error // why parts are missing
}

// writeBundle writes what is known of the agent to a new file.
func (d *doctorCommand) writeBundle(ctx context.Context, status agent.Status, report problems.Report) (err error) {
	file, err := os.OpenFile(d.bundle, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) // not through a link of another user
	if err != nil {
		return fmt.Errorf("--bundle: %w", err)
	}
	defer func() {
		if err = errors.Join(err, file.Close()); err != nil {
			_ = os.Remove(d.bundle)
		}
	}()
	b := &bundle{client: &d.client, tar: tar.NewWriter(file)}
	err = errors.Join(
		b.add("version.txt", []byte(version.String()+"\n")),
		b.addJSON("problems.json", report),
		b.addJSON("status.json", status),
		b.addReply(ctx, "settings.json", "/debug/settings", nil),
		b.addReply(ctx, "failures.json", "/debug/tail", url.Values{agent.ParamSince: {allOf.String()}, agent.ParamOnce: {"true"}}),
		b.addReply(ctx, "metrics.txt", "/metrics", nil),
		b.addDigest(ctx),
		b.addFile("resolv.conf", d.resolvConf()),
		b.addFile("nsswitch.conf", nsswitchConf),
	)
	var missing bytes.Buffer
	for _, e := range b.errs {
		fmt.Fprintln(&missing, e)
	}
	return errors.Join(err, b.add("missing.txt", missing.Bytes()), b.tar.Close())
}

// add adds a file.
func (b *bundle) add(name string, content []byte) error {
	header := &tar.Header{Name: "nametap/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: time.Now()}
	if err := b.tar.WriteHeader(header); err != nil {
		return err
	}
	_, err := b.tar.Write(content)
	return err
}

// addJSON adds a value.
func (b *bundle) addJSON(name string, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return b.add(name, append(text, '\n'))
}

// addFile adds a file of this host, or notes why it cannot be read.
func (b *bundle) addFile(name, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		b.errs = append(b.errs, err)
		return nil
	}
	return b.add(name, text)
}

// addReply adds the agent's reply to a request, or notes why there is none.
func (b *bundle) addReply(ctx context.Context, name, path string, query url.Values) error {
	text, err := b.reply(ctx, path, query)
	if err != nil {
		b.errs = append(b.errs, err)
		return nil
	}
	return b.add(name, text)
}

// addDigest adds a digest of the table, which tells whether two agents have the same.
func (b *bundle) addDigest(ctx context.Context) error {
	text, err := b.reply(ctx, "/debug/ndsz", nil)
	if err != nil {
		b.errs = append(b.errs, err)
		return nil
	}
	return b.add("table.txt", fmt.Appendf(nil, "sha256 of /debug/ndsz: %x, %d bytes\n", sha256.Sum256(text), len(text)))
}

// reply returns the agent's reply to a request.
func (b *bundle) reply(ctx context.Context, path string, query url.Values) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	resp, err := b.client.request(ctx, http.MethodGet, path, query)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}
