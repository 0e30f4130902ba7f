// Search runs in a worker, which browsers do not start from a file: there, a hidden frame with the same script
// stands in for it. The theme would fetch such a script from the network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.scope = frame.contentWindow;
      this.scope.answer = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const page = this.scope.document;
      page.open();
      page.write(`<script>
        postMessage = (data) => answer(data);
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = done;
          document.body.appendChild(script);
        })), Promise.resolve());
      </script><script src="${url}"></script>`);
      page.close();
      this.ready = new Promise((done) => { frame.onload = done; });
    }
    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.scope.frameElement.remove();
    }
  };
}
